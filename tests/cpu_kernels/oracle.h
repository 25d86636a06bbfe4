// Test tensors that keep exactly what the kernel sees, and comparison with an oracle computed in double.
#pragma once
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "backends/cpu_gloo/kernels/context.h"
#include "base/rng.h"

namespace hotbunk::kernels::test {

/// Deterministic numbers of about unit size.
class Random {
 public:
  explicit Random(std::uint64_t seed) : seed_(seed) {}
  double normal() { return normal2(seed_, RngPurpose::test, counter_++, 0)[0]; }
  double uniform() { return uniform24(random_words(seed_, RngPurpose::test, counter_++, 1)[0]); }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(uniform() * static_cast<double>(n)); }

 private:
  std::uint64_t seed_, counter_ = 0;
};

/// rows × cols with `ld` ≥ cols; what lies between the rows and after the last is a sentinel that kernels must not
/// touch. Values are doubles rounded to the dtype when set, so an oracle that reads them sees the kernel's input.
class Tensor {
 public:
  Tensor(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), ld_(ld ? ld : cols) {
    bytes_.assign(static_cast<std::size_t>((rows_ * ld_ + kTail) * size_of(dtype)), kSentinel);
  }
  static Tensor random(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld, Random& rng,
                       double size = 1.0) {
    Tensor t(dtype, rows, cols, ld);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < cols; ++c) t.set(r, c, size * rng.normal());
    return t;
  }
  static Tensor filled(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld, double value) {
    Tensor t(dtype, rows, cols, ld);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < cols; ++c) t.set(r, c, value);
    return t;
  }

  DType dtype() const { return dtype_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  void* data() { return bytes_.data(); }
  float* f32() { return reinterpret_cast<float*>(bytes_.data()); }
  const float* f32() const { return reinterpret_cast<const float*>(bytes_.data()); }
  Matrix matrix() { return {bytes_.data(), dtype_, ld_}; }
  ConstMatrix matrix() const { return {bytes_.data(), dtype_, ld_}; }
  ConstVector vector() const { return {bytes_.data(), dtype_}; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  double at(std::int64_t r, std::int64_t c) const {
    const unsigned char* p = bytes_.data() + (r * ld_ + c) * size_of(dtype_);
    if (dtype_ == DType::f32) {
      float x;
      std::memcpy(&x, p, 4);
      return x;
    }
    std::uint16_t x;
    std::memcpy(&x, p, 2);
    return to_f32(bf16{x});
  }
  void set(std::int64_t r, std::int64_t c, double value) {
    unsigned char* p = bytes_.data() + (r * ld_ + c) * size_of(dtype_);
    const auto x = static_cast<float>(value);
    const std::uint16_t h = to_bf16(x).bits;
    if (dtype_ == DType::f32) std::memcpy(p, &x, 4);
    else std::memcpy(p, &h, 2);
  }
  /// True when nothing outside the rectangle was written.
  bool padding_intact() const {
    const std::int64_t size = size_of(dtype_);
    for (std::int64_t i = 0; i < std::ssize(bytes_); ++i) {
      const std::int64_t e = i / size;
      const bool inside = e / std::max<std::int64_t>(1, ld_) < rows_ && e % std::max<std::int64_t>(1, ld_) < cols_;
      if (!inside && bytes_[static_cast<std::size_t>(i)] != kSentinel) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kSentinel = 0xa5;
  static constexpr std::int64_t kTail = 64;
  DType dtype_;
  std::int64_t rows_, cols_, ld_;
  std::vector<unsigned char> bytes_;
};

using Oracle = std::function<double(std::int64_t r, std::int64_t c)>;

/// Largest |actual − oracle| relative to the largest |oracle|, what rounding to bf16 explains (2⁻⁸ of the value: half
/// a unit in the last place is 2⁻⁹) taken off first.
inline double error_of(const Tensor& actual, const Oracle& oracle) {
  double worst = 0.0, largest = 0.0;
  for (std::int64_t r = 0; r < actual.rows(); ++r)
    for (std::int64_t c = 0; c < actual.cols(); ++c) {
      const double want = oracle(r, c);
      const double rounding = actual.dtype() == DType::bf16 ? std::abs(want) / 256 : 0.0;
      const double error = std::abs(actual.at(r, c) - want);
      if (!(error <= rounding)) worst = std::isnan(error) ? INFINITY : std::max(worst, error - rounding);
      largest = std::max(largest, std::abs(want));
    }
  return largest > 0 ? worst / largest : worst;
}

inline void check_close(const Tensor& actual, const Oracle& oracle, double tolerance) {
  CHECK(error_of(actual, oracle) <= tolerance);
  CHECK(actual.padding_intact());
}

/// fp32 sums of some thousand terms against double.
inline constexpr double kF32Tolerance = 5e-6;
/// The dtypes every kernel takes.
inline constexpr DType kFloatTypes[] = {DType::f32, DType::bf16};

}  // namespace hotbunk::kernels::test
