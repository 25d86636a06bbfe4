#include "backends/cpu_gloo/kernels/sinks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

std::vector<float> in_f32(ConstVector x, std::int64_t n) {
  std::vector<float> out(static_cast<std::size_t>(n));
  with_float_type(x.dtype, [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(x.data);
    for (std::int64_t i = 0; i < n; ++i) out[static_cast<std::size_t>(i)] = as_f32(from[i]);
  });
  return out;
}

}  // namespace

void attention_sinks(KernelContext& ctx, Matrix o, float* lse, ConstVector sinks, std::int64_t T, std::int64_t heads,
                     std::int64_t head_dim) {
  const std::vector<float> of_heads = in_f32(sinks, heads);
  with_float_type(o.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(2 * heads * head_dim), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t h = 0; h < heads; ++h) {
          float& sum = lse[t * heads + h];
          const float sink = of_heads[static_cast<std::size_t>(h)], top = std::max(sum, sink);
          const float both = top + std::log(std::exp(sum - top) + std::exp(sink - top));
          const Vf share = splat(std::exp(sum - both));
          E* out = row<E>(o, t) + h * head_dim;
          for_vectors(head_dim,
                      [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(out + j, share * ld(out + j)); });
          sum = both;
        }
    });
  });
}

void attention_part(KernelContext& ctx, Matrix o, float* lse, const float* parts, std::int64_t ranks, std::int64_t T,
                    std::int64_t heads, std::int64_t head_dim) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  with_float_type(o.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(2 * heads * head_dim), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t h = 0; h < heads; ++h) {
          const auto part = [&](std::int64_t r) { return parts[(r * T + t) * heads + h]; };
          float top = none, sum = 0.0f;
          for (std::int64_t r = 0; r < ranks; ++r) top = std::max(top, part(r));
          for (std::int64_t r = 0; r < ranks && top > none; ++r) sum += std::exp(part(r) - top);
          float& own = lse[t * heads + h];
          const float all = top > none ? top + std::log(sum) : none;
          const Vf share = splat(own > none ? std::exp(own - all) : 0.0f);
          E* out = row<E>(o, t) + h * head_dim;
          for_vectors(head_dim,
                      [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(out + j, share * ld(out + j)); });
          own = all;
        }
    });
  });
}

void attention_sinks_backward(KernelContext& ctx, ConstMatrix d_o, ConstMatrix o, const float* lse, ConstVector sinks,
                              float* d_sinks, std::int64_t T, std::int64_t heads, std::int64_t head_dim, Write write) {
  HB_CHECK(d_o.dtype == o.dtype, "attention_sinks_backward: {} and {}", name_of(d_o.dtype), name_of(o.dtype));
  const std::vector<float> of_heads = in_f32(sinks, heads);
  // Heads are split over threads, tokens are not: the order of every sum is the order of the tokens.
  with_float_type(o.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t h = begin; h < end; ++h) {
        double total = write == Write::accumulate ? d_sinks[h] : 0.0;
        for (std::int64_t t = 0; t < T; ++t) {
          const E *d = row<E>(d_o, t) + h * head_dim, *y = row<E>(o, t) + h * head_dim;
          Vf dot{};
          for_vectors(head_dim, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE { dot += ld(d + j) * ld(y + j); });
          total -= static_cast<double>(std::exp(of_heads[static_cast<std::size_t>(h)] - lse[t * heads + h]) *
                                       sum_lanes(dot));
        }
        d_sinks[h] = static_cast<float>(total);
      }
    });
  });
}

}  // namespace hotbunk::kernels
