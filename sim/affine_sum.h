// The sum of a price over many steps that differ a little, from few of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hotbunk {

/// The sum of value(0) … value(n - 1), of a function that is smooth but for kinks. Between two values it takes it for
/// affine where the one in the middle lies on the line to 1 ns or 1e-5, else it looks at both halves. Exact where it is
/// affine in integers.
template <class Value>
std::int64_t sum_of_affine_pieces(Value&& value, std::int64_t n) {
  const auto inside = [&](auto&& self, std::int64_t first, std::int64_t at_first, std::int64_t last,
                          std::int64_t at_last) -> std::int64_t {  // of those between `first` and `last`
    const std::int64_t count = last - first - 1;
    if (count <= 0) return 0;
    const std::int64_t middle = first + (last - first) / 2, at_middle = value(middle);
    const double share = static_cast<double>(middle - first) / static_cast<double>(last - first);
    const double line = static_cast<double>(at_first) + share * static_cast<double>(at_last - at_first);
    if (std::abs(line - static_cast<double>(at_middle)) <= std::max(1.0, 1e-5 * line))
      return std::llround(0.5 * static_cast<double>(count) * static_cast<double>(at_first + at_last));
    return self(self, first, at_first, middle, at_middle) + at_middle + self(self, middle, at_middle, last, at_last);
  };
  if (n <= 0) return 0;
  const std::int64_t at_first = value(0);
  if (n == 1) return at_first;
  const std::int64_t at_last = value(n - 1);
  return at_first + inside(inside, 0, at_first, n - 1, at_last) + at_last;
}

}  // namespace hotbunk
