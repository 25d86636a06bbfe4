// A set of bytes as disjoint ranges: which are written, mapped, or alive.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace hotbunk {

/// Sorted, no two adjacent. An array, not a tree: plans keep few ranges in a section at a time, and the verifier asks
/// several times for every op.
class ByteRanges {
  struct Range {
    std::int64_t begin, end;
    friend bool operator==(const Range&, const Range&) = default;
  };
  /// The first range with bytes behind `at`.
  template <class Ranges>
  static auto ending_behind(Ranges& ranges, std::int64_t at) {
    return std::ranges::upper_bound(ranges, at, {}, &Range::end);
  }

 public:
  bool empty() const { return ranges_.empty(); }

  /// Whether every byte of [begin, end) is in the set.
  bool holds(std::int64_t begin, std::int64_t end) const {
    if (begin >= end) return true;
    const auto at = ending_behind(ranges_, begin);
    return at != ranges_.end() && at->begin <= begin && at->end >= end;
  }

  /// Whether any byte of [begin, end) is in the set.
  bool meets(std::int64_t begin, std::int64_t end) const {
    if (begin >= end) return false;
    const auto at = ending_behind(ranges_, begin);
    return at != ranges_.end() && at->begin < end;
  }

  /// Behind the last byte in the set, 0 of an empty one.
  std::int64_t end() const { return empty() ? 0 : ranges_.back().end; }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const Range& r : ranges_) sum += r.end - r.begin;
    return sum;
  }

  /// Calls on_part(begin, end, held) for the parts of [begin, end) that are in the set or are not, in order.
  template <class OnPart>
  void each_part(std::int64_t begin, std::int64_t end, OnPart&& on_part) const {
    for (auto at = ending_behind(ranges_, begin); begin < end && at != ranges_.end() && at->begin < end; ++at) {
      if (begin < at->begin) on_part(begin, at->begin, false);
      begin = std::max(begin, at->begin);
      on_part(begin, std::min(at->end, end), true);
      begin = std::min(at->end, end);
    }
    if (begin < end) on_part(begin, end, false);
  }

  void add(std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    const auto first = ending_behind(ranges_, begin - 1);  // one that ends at `begin` grows
    auto last = first;
    for (; last != ranges_.end() && last->begin <= end; ++last) {
      begin = std::min(begin, last->begin);
      end = std::max(end, last->end);
    }
    if (first == last) {
      ranges_.insert(first, {begin, end});
    } else {
      *first = {begin, end};
      ranges_.erase(std::next(first), last);
    }
  }

  void remove(std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    auto first = ending_behind(ranges_, begin);
    if (first != ranges_.end() && first->begin < begin) {
      const Range left{first->begin, begin};
      first->begin = begin;
      first = std::next(ranges_.insert(first, left));
    }
    auto last = first;
    while (last != ranges_.end() && last->end <= end) ++last;
    if (last != ranges_.end() && last->begin < end) last->begin = end;
    ranges_.erase(first, last);
  }

  friend bool operator==(const ByteRanges&, const ByteRanges&) = default;

 private:
  std::vector<Range> ranges_;
};

}  // namespace hotbunk
