// The last accesses of every byte, by address: a map of disjoint intervals. It answers "what must come before this
// access".
#pragma once
#include <array>
#include <cstdint>
#include <map>

#include "graph/access.h"

namespace hotbunk {

class ConflictMap {
 public:
  /// Calls earlier(stream, op index) for every access that must be ordered before `a`: the last write of each byte, and
  /// for a write also the last read per stream since. Then notes `a` as made by op `index` on `stream`.
  template <class F>
  void touch(const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    if (a.end <= a.begin) return;
    auto& intervals = sections_[static_cast<std::size_t>(a.section)];
    split(intervals, a.begin);
    split(intervals, a.end);
    if (a.write) write(intervals, a, stream, index, earlier);
    else read(intervals, a, stream, index, earlier);
  }

 private:
  struct Node {
    std::int64_t end = 0;
    std::int32_t writer = -1;
    std::int8_t writer_stream = 0;
    std::array<std::int32_t, num_streams> readers = {-1, -1, -1, -1, -1, -1, -1, -1};
  };
  using Intervals = std::map<std::int64_t, Node>;

  template <class F>
  static void read(Intervals& intervals, const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    std::int64_t at = a.begin;
    for (auto it = intervals.lower_bound(a.begin); at < a.end; ++it) {
      if (it == intervals.end() || it->first > at) {  // a hole: nobody touched it yet
        const std::int64_t end = it == intervals.end() ? a.end : std::min(a.end, it->first);
        it = intervals.emplace_hint(it, at, Node{.end = end});
      }
      Node& node = it->second;
      if (node.writer >= 0) earlier(static_cast<StreamId>(node.writer_stream), node.writer);
      node.readers[static_cast<std::size_t>(stream)] = index;
      at = node.end;
    }
  }

  /// What was known of the bytes is asked for, then forgotten: one interval remains.
  template <class F>
  static void write(Intervals& intervals, const Access& a, StreamId stream, std::int32_t index, F&& earlier) {
    const auto first = intervals.lower_bound(a.begin);
    auto it = first;
    for (; it != intervals.end() && it->first < a.end; ++it) {
      const Node& node = it->second;
      if (node.writer >= 0) earlier(static_cast<StreamId>(node.writer_stream), node.writer);
      for (int s = 0; s < num_streams; ++s)
        if (const std::int32_t reader = node.readers[static_cast<std::size_t>(s)]; reader >= 0)
          earlier(static_cast<StreamId>(s), reader);
    }
    const Node mine{.end = a.end, .writer = index, .writer_stream = static_cast<std::int8_t>(stream)};
    if (first != it && first->first == a.begin) {
      first->second = mine;
      intervals.erase(std::next(first), it);
    } else {
      intervals.emplace_hint(intervals.erase(first, it), a.begin, mine);
    }
  }

  static void split(Intervals& intervals, std::int64_t at) {
    auto it = intervals.upper_bound(at);
    if (it == intervals.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Node right = it->second;
    it->second.end = at;
    intervals.emplace_hint(std::next(it), at, right);
  }

  std::array<Intervals, num_sections> sections_;
};

}  // namespace hotbunk
