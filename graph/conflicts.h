// The last accesses of every byte, disjoint intervals: by address, or of each buffer for itself. It answers "what must
// come before this access".
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include "graph/access.h"
#include "graph/clock.h"

namespace hotbunk {

class ConflictMap {
 public:
  /// By address.
  ConflictMap() = default;
  /// Bytes of transient buffers, so many in all, are their own, wherever these lie; what maps them is nobody's. Buffers
  /// of other sections never share an address.
  explicit ConflictMap(std::size_t num_buffers) : by_buffer_(true), buffers_(num_buffers) {}

  /// Calls earlier(stream, op index) for every access that must be ordered before `a`: the last write of each byte, and
  /// for a write also the last read per stream since. Then notes `a` as made by op `index` on `stream`.
  template <class F>
  void touch(const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    if (a.end <= a.begin) return;
    const bool own = by_buffer_ && a.section == transient_section;
    if (own && a.buffer < 0) return;
    Intervals& intervals =
        own ? buffers_[static_cast<std::size_t>(a.buffer)] : sections_[static_cast<std::size_t>(a.section)];
    if (own && intervals.empty()) touched_.push_back(a.buffer);
    auto first = std::ranges::upper_bound(intervals, a.begin, {}, &Interval::end);
    if (first != intervals.end() && first->begin < a.begin) first = std::next(split(intervals, first, a.begin));
    if (a.write) write(intervals, first, a, stream, index, earlier);
    else read(intervals, first, a, stream, index, earlier);
  }

  /// Nobody touched anything; the room for it stays.
  void forget() {
    for (const BufferId id : touched_) buffers_[static_cast<std::size_t>(id)].clear();
    for (Intervals& intervals : sections_) intervals.clear();
    touched_.clear();
  }

 private:
  struct Interval {
    std::int64_t begin = 0, end = 0;
    std::int32_t writer = -1;
    std::int8_t writer_stream = 0;
    Clock readers = before_all;
  };
  using Intervals = std::vector<Interval>;  // sorted; an array, since blocks touch few ranges over and over
  using At = Intervals::iterator;

  /// `first`: of the intervals that lie in or behind the access.
  template <class F>
  static void read(Intervals& intervals, At first, const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    std::int64_t at = a.begin;
    for (auto it = first; at < a.end; ++it) {
      if (it == intervals.end() || it->begin > at) {  // a hole: nobody touched it yet
        const std::int64_t end = it == intervals.end() ? a.end : std::min(a.end, it->begin);
        it = intervals.insert(it, Interval{.begin = at, .end = end});
      } else if (it->end > a.end) {
        it = split(intervals, it, a.end);
      }
      if (it->writer >= 0) earlier(static_cast<StreamId>(it->writer_stream), it->writer);
      it->readers[static_cast<std::size_t>(stream)] = index;
      at = it->end;
    }
  }

  /// What was known of the bytes is asked for, then forgotten: one interval remains.
  template <class F>
  static void write(Intervals& intervals, At first, const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    auto last = first;
    for (; last != intervals.end() && last->begin < a.end; ++last) {
      if (last->writer >= 0) earlier(static_cast<StreamId>(last->writer_stream), last->writer);
      for (std::size_t s = 0; s < last->readers.size(); ++s)
        if (const std::int32_t reader = last->readers[s]; reader >= 0) earlier(static_cast<StreamId>(s), reader);
    }
    if (last != first && std::prev(last)->end > a.end) (--last)->begin = a.end;  // its tail stays as it was
    const Interval mine{
        .begin = a.begin, .end = a.end, .writer = index, .writer_stream = static_cast<std::int8_t>(stream)};
    if (first == last) {
      intervals.insert(first, mine);
    } else {
      *first = mine;
      intervals.erase(std::next(first), last);
    }
  }

  /// Cuts an interval in two at a byte inside of it; returns the left one.
  static At split(Intervals& intervals, At it, std::int64_t at) {
    Interval left = *it;
    left.end = it->begin = at;
    return intervals.insert(it, left);
  }

  std::array<Intervals, max_sections> sections_;
  bool by_buffer_ = false;
  std::vector<Intervals> buffers_;
  std::vector<BufferId> touched_;  // whose intervals are not empty
};

}  // namespace hotbunk
