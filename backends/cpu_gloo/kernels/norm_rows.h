// RMSNorm of one row, for norm.cc and for products that norm the rows they multiply: one definition, the same bits.
// Internal to the kernels.
#pragma once
#include <cmath>
#include <cstdint>

#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

/// sum = x + delta, the residual stream's step.
template <class E>
HB_INLINE void add_rows(const E* x, const E* delta, E* sum, std::int64_t n) {
  for_vectors(n, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(sum + j, ld(x + j) + ld(delta + j)); });
}

/// 1/√(mean(x²) + eps) of one row.
template <class E>
HB_INLINE float inverse_rms(const E* x, std::int64_t n, float eps) {
  Vf sum{};
  for_vectors(n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE {
    const Vf v = ld(x + j);
    sum += v * v;
  });
  return 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(n) + eps);
}

/// A vector of a row, normed.
HB_INLINE Vf normalized(Vf x, Vf w, float offset, float rstd) { return x * rstd * (w + offset); }

}  // namespace hotbunk::kernels
