// Where transient buffers go: assign_offsets (passes.h) places a program's, the planner's closed form those of a plan
// that is not built.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "base/check.h"

namespace hotbunk {

/// Free ranges of a growing arena, best fit. Few are free at a time: a sorted array, searched and shifted in cache.
class BestFit {
 public:
  std::int64_t take(std::int64_t bytes) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->bytes >= bytes && (best == free_.end() || it->bytes < best->bytes)) best = it;
    if (best == free_.end()) {
      // The range at the end, if free, is extended; else the arena grows.
      std::int64_t at = end_;
      if (!free_.empty() && free_.back().end() == end_) {
        at = free_.back().begin;
        free_.pop_back();
      }
      end_ = at + bytes;
      return at;
    }
    const std::int64_t at = best->begin;
    if (best->bytes == bytes) free_.erase(best);
    else *best = {at + bytes, best->bytes - bytes};
    return at;
  }

  void give(std::int64_t at, std::int64_t bytes) {
    const auto next = std::ranges::lower_bound(free_, at, {}, &Range::begin);
    HB_CHECK(next == free_.end() || next->begin != at, "range at {} freed twice", at);
    const bool joins_next = next != free_.end() && at + bytes == next->begin;
    const bool joins_before = next != free_.begin() && std::prev(next)->end() == at;
    if (joins_before) {
      std::prev(next)->bytes += bytes + (joins_next ? next->bytes : 0);
      if (joins_next) free_.erase(next);
    } else if (joins_next) {
      *next = {at, bytes + next->bytes};
    } else {
      free_.insert(next, {at, bytes});
    }
  }

 private:
  struct Range {
    std::int64_t begin, bytes;
    std::int64_t end() const { return begin + bytes; }
  };
  std::vector<Range> free_;  // by begin, no two adjacent
  std::int64_t end_ = 0;
};

}  // namespace hotbunk
