// A maximum that does not hide what is wrong.
#pragma once

namespace hotbunk {

/// The greater of both; NaN when either is (std::max(a, NaN) is a, so that a gap of NaN would read as none).
template <class T>
constexpr T max_or_nan(T a, T b) {
  return (a < b || b != b) ? b : a;
}

}  // namespace hotbunk
