// Where transient buffers go: assign_offsets (passes.h) places a program's, the planner's closed form those of a plan
// that is not built.
#pragma once
#include <cstdint>
#include <iterator>
#include <map>

#include "base/check.h"

namespace hotbunk {

/// Free ranges of a growing arena, best fit.
class BestFit {
 public:
  std::int64_t take(std::int64_t bytes) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    if (best == free_.end()) {
      // The range at the end, if free, is extended; else the arena grows.
      std::int64_t at = end_;
      if (!free_.empty() && std::prev(free_.end())->first + std::prev(free_.end())->second == end_) {
        at = std::prev(free_.end())->first;
        free_.erase(std::prev(free_.end()));
      }
      end_ = at + bytes;
      return at;
    }
    const std::int64_t at = best->first, left = best->second - bytes;
    free_.erase(best);
    if (left > 0) free_.emplace(at + bytes, left);
    return at;
  }

  void give(std::int64_t at, std::int64_t bytes) {
    auto [it, added] = free_.emplace(at, bytes);
    HB_CHECK(added, "range at {} freed twice", at);
    if (auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it != free_.begin())
      if (auto before = std::prev(it); before->first + before->second == it->first) {
        before->second += it->second;
        free_.erase(it);
      }
  }

 private:
  std::map<std::int64_t, std::int64_t> free_;  // begin -> bytes
  std::int64_t end_ = 0;
};

}  // namespace hotbunk
