#include "backends/cpu_gloo/kernels/skinny.h"

#include <algorithm>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;
constexpr std::int64_t kRowBlock = 3;                       // weight rows per tile
constexpr std::int64_t kTokenBlock = kLanes == 16 ? 8 : 4;  // tokens per tile: 24 (12) accumulators in registers

/// sums[n][t] = w[n] · x[t] for NB weight rows and TB tokens.
template <int NB, int TB, class W>
HB_INLINE void dot_tile(const W* w, std::int64_t ldw, const float* x, std::int64_t ldx, std::int64_t K,
                        float (&sums)[kRowBlock][kTokenBlock]) {
  Vf acc[NB][TB] = {};
  for_vectors(K, [&](std::int64_t k, auto ld, auto) HB_FORCE_INLINE {
    Vf xv[TB];
    for (int t = 0; t < TB; ++t) xv[t] = ld(x + t * ldx + k);
    for (int n = 0; n < NB; ++n) {
      const Vf wv = ld(w + n * ldw + k);
      for (int t = 0; t < TB; ++t) acc[n][t] += wv * xv[t];
    }
  });
  for (int n = 0; n < NB; ++n)
    for (int t = 0; t < TB; ++t) sums[n][t] = sum_lanes(acc[n][t]);
}

/// The tile for exactly `tokens` ≤ TB tokens.
template <int NB, int TB, class W>
void dot_tile_tokens(std::int64_t tokens, const W* w, std::int64_t ldw, const float* x, std::int64_t ldx,
                     std::int64_t K, float (&sums)[kRowBlock][kTokenBlock]) {
  if (tokens == TB) return dot_tile<NB, TB>(w, ldw, x, ldx, K, sums);
  if constexpr (TB > 1) dot_tile_tokens<NB, TB - 1>(tokens, w, ldw, x, ldx, K, sums);
}

}  // namespace

void skinny_forward(KernelContext& ctx, ConstMatrix x, ConstMatrix w, const float* bias, Matrix y, std::int64_t T,
                    std::int64_t N, std::int64_t K, Write write) {
  if (T == 0 || N == 0) return;
  const float* xf = static_cast<const float*>(x.data);
  std::int64_t ldx = x.ld;
  if (x.dtype != DType::f32) {
    auto* wide = static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(T * K) * sizeof(float)));
    const Box box{.src_pitch = x.ld, .dst_pitch = K, .rows = T, .cols = K};
    copy_boxes(ctx, {x.data, x.dtype}, wide, DType::f32, {&box, 1});
    xf = wide;
    ldx = K;
  }
  const std::int64_t blocks = (N + kRowBlock - 1) / kRowBlock;
  const auto run = [&](auto w_tag, auto y_tag) {
    using W = decltype(w_tag);
    using Y = decltype(y_tag);
    parallel_for(ctx, blocks, rows_grain(kRowBlock * K), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        const std::int64_t n0 = b * kRowBlock;
        const std::int64_t rows = std::min(kRowBlock, N - n0);
        for (std::int64_t t0 = 0; t0 < T; t0 += kTokenBlock) {
          const std::int64_t tokens = std::min(kTokenBlock, T - t0);
          float sums[kRowBlock][kTokenBlock];
          if (rows == kRowBlock) {
            dot_tile_tokens<kRowBlock, kTokenBlock>(tokens, row<W>(w, n0), w.ld, xf + t0 * ldx, ldx, K, sums);
          } else {
            for (std::int64_t n = 0; n < rows; ++n) {
              float one[kRowBlock][kTokenBlock];
              dot_tile_tokens<1, kTokenBlock>(tokens, row<W>(w, n0 + n), w.ld, xf + t0 * ldx, ldx, K, one);
              std::copy_n(one[0], kTokenBlock, sums[n]);
            }
          }
          for (std::int64_t t = 0; t < tokens; ++t) {
            Y* out = row<Y>(y, t0 + t) + n0;
            for (std::int64_t n = 0; n < rows; ++n) {
              float v = sums[n][t] + (bias ? bias[n0 + n] : 0.0f);
              if (write == Write::accumulate) v += as_f32(out[n]);
              out[n] = from_f32<Y>(v);
            }
          }
        }
      }
    });
  };
  with_float_type(w.dtype, [&](auto w_tag) { with_float_type(y.dtype, [&](auto y_tag) { run(w_tag, y_tag); }); });
}

}  // namespace hotbunk::kernels
