// Where transient buffers go (passes.h: place_transients).
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "graph/clock.h"

namespace hotbunk {

/// Free ranges of a growing arena, best fit among those that who asks knows to be done with. Few are free at a time: a
/// sorted array, searched and shifted in cache.
class OrderedRanges {
 public:
  /// The smallest stretch that holds `bytes` and whose former uses are all in `known`, the lowest of equals; behind
  /// everything if there is none.
  std::int64_t take(std::int64_t bytes, const Clock& known) {
    auto best = free_.end(), end_of_best = free_.end();
    std::int64_t smallest = 0;
    auto last = free_.end();  // the first of the usable stretch at the arena's end
    for (auto it = free_.begin(); it != free_.end();) {
      // What lies side by side, whether usable or not: most of it is too small, and no clock need be read.
      auto end_of_run = std::next(it);
      while (end_of_run != free_.end() && end_of_run->begin == std::prev(end_of_run)->end) ++end_of_run;
      const std::int64_t run_end = std::prev(end_of_run)->end;
      if (run_end - it->begin < bytes && run_end != end_) it = end_of_run;
      while (it != end_of_run) {
        if (!is_done(*it, known)) {
          ++it;
          continue;
        }
        auto next = std::next(it);
        while (next != end_of_run && is_done(*next, known)) ++next;
        const std::int64_t size = std::prev(next)->end - it->begin;
        if (size == bytes) return cut(it, next, bytes);  // none is smaller
        if (size > bytes && (best == free_.end() || size < smallest)) best = it, end_of_best = next, smallest = size;
        if (next == free_.end() && run_end == end_) last = it;
        it = next;
      }
    }
    if (best != free_.end()) return cut(best, end_of_best, bytes);
    const std::int64_t at = last == free_.end() ? end_ : last->begin;
    free_.erase(last, free_.end());
    end_ = at + bytes;
    return at;
  }

  /// `done`: the last uses of what lay there.
  void give(std::int64_t at, std::int64_t bytes, const Clock& done) {
    const auto next = std::ranges::lower_bound(free_, at, {}, &Range::begin);
    HB_CHECK(next == free_.end() || next->begin != at, "range at {} freed twice", at);
    const auto used = [&](std::int32_t use) { return use >= 0; };
    Range range{.begin = at, .end = at + bytes};
    if (const auto first = std::ranges::find_if(done, used); first != done.end()) {
      range.stream = static_cast<std::int8_t>(first - done.begin()), range.use = *first;
      if (std::find_if(std::next(first), done.end(), used) != done.end())
        range.clock = static_cast<std::int32_t>(done_.size()), done_.push_back(done);
    }
    free_.insert(next, range);
  }

  /// Whoever asks from now on knows `known` at least: what all of them are done with is one stretch where it lies side
  /// by side, so that there is less to look at. What take() answers does not change.
  void join(const Clock& known) {
    auto out = free_.begin();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (is_done(*it, known)) it->use = -1, it->clock = -1, it->stream = 0;
      const bool joins =
          out != free_.begin() && it->use < 0 && std::prev(out)->use < 0 && std::prev(out)->end == it->begin;
      if (joins) std::prev(out)->end = it->end;
      else *out++ = *it;
    }
    free_.erase(out, free_.end());
  }

  /// All streams meet: whoever asks from now on knows of all uses. Where nothing is taken it begins anew.
  void settle() {
    std::vector<Range> joined;
    for (const Range& r : free_)
      if (!joined.empty() && joined.back().end == r.begin) joined.back().end = r.end;
      else joined.push_back({.begin = r.begin, .end = r.end});
    if (joined.size() == 1 && joined[0].begin == 0 && joined[0].end == end_) joined.clear(), end_ = 0;
    free_ = std::move(joined);
    done_.clear();
  }

 private:
  struct Range {
    std::int64_t begin, end;
    // What lay there was last used by this op of this stream; of most ranges, by no other stream. -1: known to all.
    std::int32_t use = -1;
    std::int32_t clock = -1;  // others did too: index into done_, for all ranges are searched and shifted
    std::int8_t stream = 0;
  };
  using At = std::vector<Range>::iterator;

  bool is_done(const Range& r, const Clock& known) const {
    return known[static_cast<std::size_t>(r.stream)] >= r.use &&
           (r.clock < 0 || covers(known, done_[static_cast<std::size_t>(r.clock)]));
  }

  /// The first bytes of the stretch [first, last).
  std::int64_t cut(At first, At last, std::int64_t bytes) {
    const std::int64_t at = first->begin, end = at + bytes;
    auto it = first;
    while (it != last && it->end <= end) ++it;
    if (it != last) it->begin = end;
    free_.erase(first, it);
    return at;
  }

  std::vector<Range> free_;  // by begin
  std::vector<Clock> done_;  // the last uses of what several streams used and gave since all of them met
  std::int64_t end_ = 0;
};

}  // namespace hotbunk
