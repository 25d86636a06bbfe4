#include "backends/cpu_gloo/kernels/lora.h"

#include <algorithm>
#include <vector>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"
#include "base/check.h"

namespace hotbunk::kernels {
namespace {

ConstMatrix from_column(ConstMatrix m, std::int64_t column) {
  return {static_cast<const char*>(m.data) + column * size_of(m.dtype), m.dtype, m.ld};
}
Matrix from_column(Matrix m, std::int64_t column) {
  return {static_cast<char*>(m.data) + column * size_of(m.dtype), m.dtype, m.ld};
}

}  // namespace

void lora_down(KernelContext& ctx, ConstMatrix x, ConstMatrix a, float factor, Matrix u, LoraShape s) {
  linear_forward(ctx, x, a, {}, u, s.rows, s.second, s.first);
  scale(ctx, u.data, u.dtype, s.rows * s.second, factor);
}

void lora_up(KernelContext& ctx, ConstMatrix u, ConstMatrix b, Matrix y, std::int64_t column, LoraShape s) {
  linear_forward(ctx, u, b, {}, from_column(y, column), s.rows, s.first, s.second, Write::accumulate);
}

void lora_up_dgrad(KernelContext& ctx, ConstMatrix dy, ConstMatrix b, std::int64_t column, float factor, Matrix du,
                   LoraShape s) {
  linear_dgrad(ctx, from_column(dy, column), b, du, s.rows, s.first, s.second, Write::overwrite);
  scale(ctx, du.data, du.dtype, s.rows * s.second, factor);
}

void lora_up_wgrad(KernelContext& ctx, ConstMatrix dy, ConstMatrix u, std::int64_t column, Matrix db, LoraShape s,
                   Write write) {
  linear_wgrad(ctx, from_column(dy, column), u, db, s.rows, s.first, s.second, write);
}

void lora_down(KernelContext& ctx, const Experts& experts, ConstMatrix x, ConstMatrix a, float factor, Matrix u) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool) {
    lora_down(ctx, from_row(x, begin), from_row(a, e * experts.N), factor, from_row(u, begin),
              {rows, experts.K, experts.N});
  });
  zero_rows(ctx, u, experts.offsets.back(), experts.rows, experts.N);
}

void lora_up(KernelContext& ctx, const Experts& experts, ConstMatrix u, ConstMatrix b, Matrix y, std::int64_t column) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool) {
    lora_up(ctx, from_row(u, begin), from_row(b, e * experts.N), from_row(y, begin), column,
            {rows, experts.N, experts.K});
  });
}

void lora_up_dgrad(KernelContext& ctx, const Experts& experts, ConstMatrix dy, ConstMatrix b, std::int64_t column,
                   float factor, Matrix du) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool) {
    lora_up_dgrad(ctx, from_row(dy, begin), from_row(b, e * experts.N), column, factor, from_row(du, begin),
                  {rows, experts.N, experts.K});
  });
  zero_rows(ctx, du, experts.offsets.back(), experts.rows, experts.K);
}

void lora_up_wgrad(KernelContext& ctx, const Experts& experts, ConstMatrix dy, ConstMatrix u, std::int64_t column,
                   Matrix db, Write write) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool first) {
    lora_up_wgrad(ctx, from_row(dy, begin), from_row(u, begin), column, from_row(db, e * experts.N),
                  {rows, experts.N, experts.K}, first ? write : Write::accumulate);
  });
}

void lora_merge(KernelContext& ctx, ConstMatrix w, ConstMatrix b, ConstMatrix a, float factor, Matrix y, LoraShape s) {
  HB_CHECK(a.dtype == b.dtype, "an adapter of {} and {}", name_of(a.dtype), name_of(b.dtype));
  const std::int64_t K = s.first, r = s.second;
  with_float_type(w.dtype, [&](auto w_tag) {
    with_float_type(a.dtype, [&](auto a_tag) {
      with_float_type(y.dtype, [&](auto y_tag) {
        using W = decltype(w_tag);
        using A = decltype(a_tag);
        using Y = decltype(y_tag);
        parallel_for(ctx, s.rows, rows_grain(K * (r + 1)), [&](std::int64_t begin, std::int64_t end) {
          std::vector<float> sum(static_cast<std::size_t>(K));
          for (std::int64_t i = begin; i < end; ++i) {
            std::ranges::fill(sum, 0.0f);
            const A* left = row<A>(b, i);
            for (std::int64_t k = 0; k < r; ++k) {
              const float by = as_f32(left[k]);
              const A* right = row<A>(a, k);
              for (std::int64_t j = 0; j < K; ++j) sum[static_cast<std::size_t>(j)] += by * as_f32(right[j]);
            }
            const W* base = row<W>(w, i);
            Y* to = row<Y>(y, i);
            for (std::int64_t j = 0; j < K; ++j)
              to[j] = from_f32<Y>(as_f32(base[j]) + factor * sum[static_cast<std::size_t>(j)]);
          }
        });
      });
    });
  });
}

}  // namespace hotbunk::kernels
