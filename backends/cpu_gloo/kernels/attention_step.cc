#include "backends/cpu_gloo/kernels/attention_step.h"

namespace hotbunk::kernels {
namespace {

void cap_scores(float* s, std::int64_t rows, std::int64_t width, float cap) {
  const float inverse = 1.0f / cap;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; c += kLanes)
      store(s + r * kBlock + c, cap * tanh(load(s + r * kBlock + c) * inverse));
}

/// Queries [r0, r0 + n), of which the last sees `keys` > 0.
void attend_group(const AttentionTile& t, std::int64_t r0, std::int64_t n, std::int64_t keys, std::int64_t d,
                  const float* k_t, const float* v, const SeenKeys& seen, float softcap, bool first) {
  const std::int64_t width = round_up(keys, kLanes), dp = t.dp;
  float* s = t.s + r0 * kBlock;
  gemm_small(n, width, d, t.q + r0 * d, d, 1, k_t, kBlock, s, kBlock, false);
  weigh_scores(t, r0, n, width, seen, softcap, first);
  gemm_small(n, dp, keys, s, kBlock, 1, v, dp, t.o + r0 * dp, dp, !first);
}

}  // namespace

void weigh_scores(const AttentionTile& t, std::int64_t r0, std::int64_t n, std::int64_t width, const SeenKeys& seen,
                  float softcap, bool first) {
  float* s = t.s + r0 * kBlock;
  if (softcap > 0.0f) cap_scores(s, n, width, softcap);
  for (std::int64_t r = 0; r < n; r += kLanes) {
    float* part = s + r * kBlock;
    const std::int64_t further = (r0 + r) * seen.per_row;
    softmax_step(part, r0 + r, std::min<std::int64_t>(kLanes, n - r), width,
                 {seen.begin + further, seen.end + further, seen.per_row, seen.limit}, 1.0f, t.state,
                 [&](std::int64_t i, std::int64_t c, Vf p) HB_FORCE_INLINE { store(part + i * kBlock + c, p); });
  }
  if (!first) shrink_rows(t.state.shrink + r0, t.o + r0 * t.dp, n, t.dp);
}

void attend_block(const AttentionTile& t, std::int64_t rows, std::int64_t d, const float* k_t, const float* v,
                  const SeenKeys& seen, float softcap, bool first) {
  if (first) t.state.reset();
  if (seen.end >= seen.limit || seen.per_row == 0)
    return attend_group(t, 0, rows, std::min(seen.end, seen.limit), d, k_t, v, seen, softcap, first);
  // On the diagonal, groups of rows, each as wide as its last row sees: half a tile is skipped.
  for (std::int64_t r0 = 0; r0 < rows; r0 += kGroup) {
    const std::int64_t n = std::min(kGroup, rows - r0), keys = std::min(seen.end + r0 + n - 1, seen.limit);
    if (keys > 0) attend_group(t, r0, n, keys, d, k_t, v, seen, softcap, first);
  }
}

}  // namespace hotbunk::kernels
