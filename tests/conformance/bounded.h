// Numbers in fp64 that carry how far a kernel's may be from them: the tolerances of oracle.h are derived, not chosen.
//
// A kernel computes in fp32 (unit roundoff u = 2^-24) and rounds what it stores to the tensor's dtype (bf16: 2^-8).
// Inputs are exact. An operation on a and b, known to within da and db, comes to within what it makes of these (its
// derivative by a times da, …) and one rounding of its own, u times the result. A sum of n terms, in whatever order,
// comes to within the terms' own errors and 2 n u times the sum of their magnitudes: a rounding per addition, and twice
// that because tensor cores cut off where others round. Functions: what CUDA's fast ones are allowed (its programming
// guide, table of intrinsics), which the CPU's are within.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/dtype.h"

namespace hotbunk::conformance {

/// Unit roundoff: half a unit in the last place of 1.
constexpr double roundoff(DType t) { return t == DType::bf16 ? 0x1p-8 : t == DType::f64 ? 0x1p-53 : 0x1p-24; }
inline constexpr double fp32 = roundoff(DType::f32);

struct Bounded {
  double value = std::numeric_limits<double>::quiet_NaN(), error = 0.0;  // nothing is close to what was never set

  constexpr Bounded() = default;
  constexpr explicit(false) Bounded(double exact) : value(exact) {}
  constexpr Bounded(double v, double e) : value(v), error(e) {}
  double largest() const { return std::abs(value) + error; }
  Bounded& operator+=(Bounded b);
};

/// Rounded once more, to what a tensor or a kernel's operand has.
inline Bounded rounded(Bounded a, DType to) { return {a.value, a.error + roundoff(to) * a.largest()}; }
/// A number of the plan that kernels take in fp32.
inline Bounded constant(double x) { return rounded(x, DType::f32); }

inline Bounded operator-(Bounded a) { return {-a.value, a.error}; }
inline Bounded operator+(Bounded a, Bounded b) { return rounded({a.value + b.value, a.error + b.error}, DType::f32); }
inline Bounded operator-(Bounded a, Bounded b) { return a + -b; }
inline Bounded operator*(Bounded a, Bounded b) {
  return rounded({a.value * b.value, a.error * b.largest() + b.error * std::abs(a.value)}, DType::f32);
}
/// To within two units in the last place.
inline Bounded operator/(Bounded a, Bounded b) {
  const double v = a.value / b.value, least = std::abs(b.value) - b.error;
  return {v, (a.error + std::abs(v) * b.error) / least + 4 * fp32 * std::abs(v)};
}
inline Bounded& Bounded::operator+=(Bounded b) { return *this = *this + b; }

/// e^x as 2^(x / ln 2): the product's rounding moves it by |x| u.
inline Bounded exp(Bounded a) {
  const double v = std::exp(a.value);
  if (v == 0.0) return 0.0;
  return {v, v * std::expm1(a.error + (4 + 3 * std::abs(a.value)) * fp32)};
}
/// To within 2^-21, or three units in the last place where that is more.
inline Bounded log(Bounded a) {
  const double v = std::log(a.value);
  return {v, a.error / (a.value - a.error) + 8 * fp32 + 6 * fp32 * std::abs(v)};
}
inline Bounded tanh(Bounded a) { return {std::tanh(a.value), a.error + 8 * fp32}; }
inline Bounded sigmoid(Bounded a) { return Bounded(1) / (Bounded(1) + exp(-a)); }
inline Bounded sqrt(Bounded a) {
  const double v = std::sqrt(a.value);
  return {v, std::sqrt(a.value + a.error) - v + 4 * fp32 * v};
}
inline Bounded cos(Bounded a) { return {std::cos(a.value), a.error + 4 * fp32}; }
inline Bounded sin(Bounded a) { return {std::sin(a.value), a.error + 4 * fp32}; }
inline Bounded abs(Bounded a) { return {std::abs(a.value), a.error}; }
inline Bounded max(Bounded a, Bounded b) { return {std::max(a.value, b.value), std::max(a.error, b.error)}; }

/// Terms in any order, as exact as `in` is.
class Sum {
 public:
  explicit Sum(DType in = DType::f32) : unit_(roundoff(in)) {}
  Sum& operator+=(Bounded x) {
    value_ += x.value, error_ += x.error, magnitude_ += std::abs(x.value), ++terms_;
    return *this;
  }
  explicit(false) operator Bounded() const { return {value_, error_ + 2 * terms_ * unit_ * magnitude_}; }

 private:
  double unit_, value_ = 0.0, error_ = 0.0, magnitude_ = 0.0, terms_ = 0.0;
};

}  // namespace hotbunk::conformance
