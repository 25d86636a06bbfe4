// What tests of the kernels share: dtypes, seeded draws, a toy device with one file's kernels, comparison with fp64.
//
// Tolerances. fp32 results: sums of n terms in fp32 err by at most about n 2^-24 of the sum of magnitudes (pairwise
// much less); bf16 results: one rounding to 8 bits, 2^-8 of the value, on top. Inputs are exact in their dtype.
#pragma once
#include <catch2/catch.hpp>
#include <cmath>

#include "backends/cuda/kernels/kernels.h"
#include "backends/cuda/ptx/warp.h"
#include "base/rng.h"
#include "tests/cuda_ptx/device.h"

namespace hotbunk::ptx {

using Bf16 = std::uint16_t;

inline double value(float x) { return x; }
inline double value(Bf16 x) { return from_bf16(x); }
template <class E>
E rounded(double x) {
  if constexpr (std::is_same_v<E, float>) return static_cast<float>(x);
  else return to_bf16(x);
}
/// Relative error of one rounding to E.
template <class E>
inline constexpr double unit = std::is_same_v<E, float> ? 0x1p-24 : 0x1p-8;
template <class E>
inline constexpr const char* suffix = std::is_same_v<E, float> ? "f32" : "bf16";

/// Seeded draws: shapes and data.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}
  int between(int low, int high) { return low + static_cast<int>(word() % static_cast<std::uint32_t>(high - low + 1)); }
  double number() { return 2.0 * uniform24(word()) - 1.0; }
  template <class E>
  std::vector<E> numbers(std::size_t n, double scale = 1.0) {
    std::vector<E> out(n);
    for (E& x : out) x = rounded<E>(scale * number());
    return out;
  }

 private:
  std::uint32_t word() { return random_words(seed_, RngPurpose::test, 0, next_++)[0]; }
  std::uint64_t seed_, next_ = 0;
};

/// One kernel file on a toy device.
struct Device {
  explicit Device(std::string_view file) : module(parse(kernel_ptx(file))), machine(module, memory) {}
  template <class... T>
  Counters run(const std::string& kernel, Dim3 grid, std::uint32_t threads, const T&... values) {
    return machine.launch(kernel, {grid, {threads}, 0, Arguments(values...).bytes()});
  }
  Module module;
  DeviceMemory memory;
  Machine machine;
};

/// What column_sums makes of parts[n, columns of `on`], on what was there.
inline std::vector<float> summed(const float* parts, std::size_t n, std::vector<float> on) {
  for (std::size_t j = 0; j < on.size(); ++j) {
    double sum = on[j];
    for (std::size_t p = 0; p < n; ++p) sum += parts[p * on.size() + j];
    on[j] = static_cast<float>(sum);
  }
  return on;
}

template <class E>
void near(const std::vector<E>& got, const std::vector<double>& wanted, double relative, double absolute) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i << ": " << value(got[i]) << ", not " << wanted[i]);
    REQUIRE(std::abs(value(got[i]) - wanted[i]) <= relative * std::abs(wanted[i]) + absolute);
  }
}

}  // namespace hotbunk::ptx
