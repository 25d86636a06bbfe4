// Log-sum-exp of a row of logits: the one way training and rollout both form it. Internal to the kernels.
#pragma once
#include <cstdint>

#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

HB_INLINE float row_max(const float* x, std::int64_t n) {
  Vf m = splat(-std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) m = max(m, load(x + i));
  if (i < n) m = max(m, load_n(x + i, n - i, -std::numeric_limits<float>::infinity()));
  return max_lanes(m);
}

/// Σ_j exp(inv_temperature·(x_j − max)), and with it Σ_j of that times inv_temperature·(x_j − max) when `weighted`.
struct ExpSums {
  double sum = 0.0;
  double weighted = 0.0;
};
template <bool kWeighted>
HB_INLINE ExpSums exp_sums(const float* x, std::int64_t n, float max_logit, float inv_temperature) {
  constexpr std::int64_t kBlock = 4096;  // fp32 inside a block (256 terms per lane), double across blocks
  ExpSums total;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = begin + kBlock < n ? begin + kBlock : n;
    Vf sum{}, weighted{};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Vf z = (load(x + i) - max_logit) * inv_temperature;
      const Vf e = exp(z);
      sum += e;
      if constexpr (kWeighted) weighted += e * max(z, splat(-200.0f));  // 0·(−∞) would be NaN
    }
    if (i < end) {
      const Vf z = (load_n(x + i, end - i, -std::numeric_limits<float>::infinity()) - max_logit) * inv_temperature;
      const Vf e = exp(z);
      sum += e;
      if constexpr (kWeighted) weighted += e * max(z, splat(-200.0f));
    }
    total.sum += sum_lanes(sum);
    total.weighted += sum_lanes(weighted);
  }
  return total;
}

}  // namespace hotbunk::kernels
