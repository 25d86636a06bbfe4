// What both searches keep of the points that they price: the best, the Pareto front, the nearest of what does not fit.
// Everything is ordered by price and then by the point itself, never by when it was found: an answer depends neither on
// threads nor on the order in which knobs list their values.
#pragma once
#include <algorithm>
#include <compare>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/cores.h"

namespace hotbunk {

/// Smaller is better; the second decides between equals of the first.
struct Value {
  double first = 0, second = 0;
  friend auto operator<=>(const Value&, const Value&) = default;
};
inline constexpr Value worst_value{std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};

/// The best `keep`, at most one of each kind: same(a, b) says that two points are variants of one layout.
template <class Candidate, class Same>
class TopList {
 public:
  TopList(std::size_t keep, Same same) : keep_(keep), same_(same) { list_.reserve(keep + 1); }

  /// Nothing above it can enter.
  Value bound() const { return list_.size() < keep_ ? worst_value : list_.back().value; }
  bool empty() const { return list_.empty(); }
  const Value& best() const { return list_.front().value; }

  /// Nothing above it can enter as a variant of the point's layout.
  template <class Point>
  Value entry(const Point& p) const {
    const auto twin = std::ranges::find_if(list_, [&](const Item& i) { return same_(i.candidate.point, p); });
    return twin == list_.end() ? bound() : std::min(bound(), twin->value);
  }

  /// Whether offer() would change the list.
  bool takes(const Value& value, const Candidate& c) const {
    if (keep_ == 0 || value > bound()) return false;
    const auto twin = twin_of(c);
    return twin != list_.end() ? !before(*twin, value, c) : list_.size() < keep_ || !before(list_.back(), value, c);
  }
  void offer(const Value& value, const Candidate& c) {
    if (!takes(value, c)) return;
    if (const auto twin = twin_of(c); twin != list_.end()) list_.erase(twin);
    const auto at = std::find_if_not(list_.begin(), list_.end(), [&](const Item& i) { return before(i, value, c); });
    list_.insert(at, Item{value, c});
    if (list_.size() > keep_) list_.pop_back();
  }
  void merge(const TopList& o) {
    for (const Item& i : o.list_) offer(i.value, i.candidate);
  }
  std::vector<Candidate> take() const {
    std::vector<Candidate> out;
    for (const Item& i : list_) out.push_back(i.candidate);
    return out;
  }

 private:
  struct Item {
    Value value;
    Candidate candidate;
  };
  static bool before(const Item& i, const Value& value, const Candidate& c) {
    return i.value < value || (i.value == value && i.candidate.point < c.point);
  }
  auto twin_of(const Candidate& c) const {
    return std::find_if(list_.begin(), list_.end(), [&](const Item& i) { return same_(i.candidate.point, c.point); });
  }

  std::size_t keep_;
  Same same_;
  std::vector<Item> list_;
};

/// Points that no other beats in both x and y, sorted by x; y then falls strictly.
template <class Candidate>
class Front {
 public:
  Front() { list_.reserve(256); }

  /// A point no better than (x, y) in either cannot enter, not even as an equal.
  bool beats(double x, double y) const {
    const auto at = std::upper_bound(list_.begin(), list_.end(), x, [](double s, const Item& i) { return s < i.x; });
    if (at == list_.begin()) return false;
    const Item& i = *std::prev(at);
    return i.y < y || (i.y == y && i.x < x);
  }
  void offer(double x, double y, const Candidate& c) {
    auto at = std::lower_bound(list_.begin(), list_.end(), x, [](const Item& i, double s) { return i.x < s; });
    if (at != list_.begin() && std::prev(at)->y <= y) return;
    if (at != list_.end() && at->x == x && (at->y < y || (at->y == y && !(c.point < at->candidate.point)))) return;
    auto end = at;
    while (end != list_.end() && end->y >= y) ++end;
    at = list_.erase(at, end);
    list_.insert(at, Item{x, y, c});
  }
  /// y of the last point below x but n: the y of all that follow are smaller. Infinite where there are not so many.
  double last_but(std::size_t n, double x) const {
    const auto end = std::lower_bound(list_.begin(), list_.end(), x, [](const Item& i, double s) { return i.x < s; });
    const auto count = static_cast<std::size_t>(end - list_.begin());
    return count > n ? (end - 1 - static_cast<std::ptrdiff_t>(n))->y : std::numeric_limits<double>::infinity();
  }
  void merge(const Front& o) {
    for (const Item& i : o.list_) offer(i.x, i.y, i.candidate);
  }
  std::vector<Candidate> take() const {
    std::vector<Candidate> out;
    for (const Item& i : list_) out.push_back(i.candidate);
    return out;
  }

 private:
  struct Item {
    double x, y;
    Candidate candidate;
  };
  std::vector<Item> list_;
};

/// 0 or less: the machine's.
inline int threads_of(int wanted) { return wanted > 0 ? wanted : static_cast<int>(local_cores()); }

}  // namespace hotbunk
