#include "backends/cpu_gloo/kernels/norm.h"

#include <algorithm>
#include <array>

#include "backends/cpu_gloo/kernels/norm_rows.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

template <class E, class W>
HB_INLINE void normalize(const E* x, const W* w, float offset, float rstd, E* y, std::int64_t n) {
  for_vectors(n, [&](std::int64_t j, auto ld, auto st)
                     HB_FORCE_INLINE { st(y + j, normalized(ld(x + j), ld(w + j), offset, rstd)); });
}

/// dx (+)= rstd·(dy·w − x·rstd²·mean(dy·w·x)); dw += dy·x·rstd unless dw is null. One row.
template <class E, class W>
HB_INLINE void backward_row(const E* x, const W* w, float offset, float rstd, const E* dy, E* dx, bool accumulate,
                            float* dw, std::int64_t n) {
  Vf dot{};
  for_vectors(
      n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE { dot += ld(dy + j) * (ld(w + j) + offset) * ld(x + j); });
  const float c = sum_lanes(dot) / static_cast<float>(n) * rstd * rstd * rstd;
  for_vectors(n, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
    const Vf xv = ld(x + j), dv = ld(dy + j);
    if (dw) st(dw + j, ld(dw + j) + dv * xv * rstd);
    Vf g = dv * (ld(w + j) + offset) * rstd - xv * c;
    if (accumulate) g += ld(dx + j);
    st(dx + j, g);
  });
}

template <class E>
HB_INLINE float mean_of(const E* x, std::int64_t n) {
  Vf sum{};
  for_vectors(n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE { sum += ld(x + j); });
  return sum_lanes(sum) / static_cast<float>(n);
}

/// 1/√(mean((x − mean)²) + eps) of one row.
template <class E>
HB_INLINE float inverse_deviation(const E* x, float mean, std::int64_t n, float eps) {
  static constexpr auto kOnes = [] {
    std::array<float, kLanes> ones{};
    ones.fill(1.0f);
    return ones;
  }();
  Vf sum{};
  for_vectors(n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE {
    const Vf v = (ld(x + j) - mean) * ld(kOnes.data());  // nothing behind the row's end
    sum += v * v;
  });
  return 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(n) + eps);
}

/// One row of layernorm_backward.
template <class E, class W>
HB_INLINE void layernorm_backward_row(const E* x, const W* w, float rstd, const E* dy, E* dx, bool accumulate,
                                      float* dw, float* db, std::int64_t n) {
  const float mean = mean_of(x, n);
  Vf sum{}, dot{};
  for_vectors(n, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE {
    const Vf g = ld(dy + j) * ld(w + j);
    sum += g, dot += g * (ld(x + j) - mean);
  });
  const float by = 1.0f / static_cast<float>(n);
  const float of_mean = sum_lanes(sum) * by, of_deviation = sum_lanes(dot) * by * rstd;
  for_vectors(n, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
    const Vf normed = (ld(x + j) - mean) * rstd, dv = ld(dy + j);
    if (dw != nullptr) st(dw + j, ld(dw + j) + dv * normed), st(db + j, ld(db + j) + dv);
    Vf g = (dv * ld(w + j) - of_mean - normed * of_deviation) * rstd;
    if (accumulate) g += ld(dx + j);
    st(dx + j, g);
  });
}

/// Sums of weight gradients over tokens, the same for every number of threads: tokens are cut into at most kBlocks
/// blocks (by T alone), each summed in token order into its own row; the rows are then added in order.
class BlockedWeightGrad {
 public:
  static constexpr std::int64_t kBlocks = 32;
  BlockedWeightGrad(KernelContext& ctx, std::int64_t T, std::int64_t width)
      : block_((T + kBlocks - 1) / kBlocks), width_(width) {
    num_blocks_ = block_ == 0 ? 0 : (T + block_ - 1) / block_;
    partial_ = static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(num_blocks_ * width) * 4));
  }
  /// rows(begin, end, partial sums of the block, already zero) for every block.
  template <class F>
  void run(KernelContext& ctx, std::int64_t T, F&& rows) {
    parallel_for(ctx, num_blocks_, T * width_ > 16384 ? 1 : num_blocks_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        float* sum = partial_ + b * width_;
        std::fill_n(sum, width_, 0.0f);
        rows(b * block_, std::min(T, (b + 1) * block_), sum);
      }
    });
  }
  /// dw[j] (+)= Σ_b partial[b, offset + j].
  void finish(float* dw, Write write, std::int64_t offset, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = write == Write::accumulate ? dw[j] : 0.0;
      for (std::int64_t b = 0; b < num_blocks_; ++b) sum += partial_[b * width_ + offset + j];
      dw[j] = static_cast<float>(sum);
    }
  }

 private:
  std::int64_t block_, width_, num_blocks_ = 0;
  float* partial_ = nullptr;
};

}  // namespace

// Forward rows_grain counts a row once, however often it is passed over: from its first pass on it is in the cache.
void rmsnorm_forward(KernelContext& ctx, ConstMatrix x, ConstVector w, Matrix y, float* rstd, std::int64_t T,
                     std::int64_t h, float eps, float offset) {
  HB_CHECK(x.dtype == y.dtype, "rmsnorm: {} to {}", name_of(x.dtype), name_of(y.dtype));
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(w.dtype, [&](auto w_tag) {
      const auto* weight = static_cast<const decltype(w_tag)*>(w.data);
      parallel_for(ctx, T, rows_grain(h), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          rstd[t] = inverse_rms(row<E>(x, t), h, eps);
          normalize(row<E>(x, t), weight, offset, rstd[t], row<E>(y, t), h);
        }
      });
    });
  });
}

void add_rmsnorm_forward(KernelContext& ctx, ConstMatrix x, ConstMatrix delta, ConstVector w, Matrix sum, Matrix y,
                         float* rstd, std::int64_t T, std::int64_t h, float eps, float offset) {
  HB_CHECK(x.dtype == y.dtype && x.dtype == delta.dtype && x.dtype == sum.dtype, "add_rmsnorm: mixed dtypes");
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(w.dtype, [&](auto w_tag) {
      const auto* weight = static_cast<const decltype(w_tag)*>(w.data);
      parallel_for(ctx, T, rows_grain(h), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          E* s = row<E>(sum, t);
          add_rows(row<E>(x, t), row<E>(delta, t), s, h);
          rstd[t] = inverse_rms(s, h, eps);
          normalize(s, weight, offset, rstd[t], row<E>(y, t), h);
        }
      });
    });
  });
}

void rmsnorm_backward(KernelContext& ctx, ConstMatrix x, ConstVector w, const float* rstd, ConstMatrix dy, Matrix dx,
                      Write dx_write, float* dw, Write dw_write, std::int64_t T, std::int64_t h, float offset) {
  HB_CHECK(x.dtype == dy.dtype && x.dtype == dx.dtype, "rmsnorm_backward: mixed dtypes");
  BlockedWeightGrad grad(ctx, T, h);
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(w.dtype, [&](auto w_tag) {
      const auto* weight = static_cast<const decltype(w_tag)*>(w.data);
      grad.run(ctx, T, [&](std::int64_t begin, std::int64_t end, float* sum) {
        for (std::int64_t t = begin; t < end; ++t)
          backward_row(row<E>(x, t), weight, offset, rstd[t], row<E>(dy, t), row<E>(dx, t),
                       dx_write == Write::accumulate, dw ? sum : nullptr, h);
      });
    });
  });
  if (dw) grad.finish(dw, dw_write, 0, h);
}

void layernorm_forward(KernelContext& ctx, ConstMatrix x, ConstVector w, ConstVector b, Matrix y, float* rstd,
                       std::int64_t T, std::int64_t h, float eps) {
  HB_CHECK(x.dtype == y.dtype && w.dtype == b.dtype, "layernorm: mixed dtypes");
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(w.dtype, [&](auto w_tag) {
      const auto *weight = static_cast<const decltype(w_tag)*>(w.data),
                 *bias = static_cast<const decltype(w_tag)*>(b.data);
      parallel_for(ctx, T, rows_grain(3 * h), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          const E* from = row<E>(x, t);
          E* to = row<E>(y, t);
          const float mean = mean_of(from, h), r = rstd[t] = inverse_deviation(from, mean, h, eps);
          for_vectors(h, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
            st(to + j, (ld(from + j) - mean) * r * ld(weight + j) + ld(bias + j));
          });
        }
      });
    });
  });
}

void layernorm_backward(KernelContext& ctx, ConstMatrix x, ConstVector w, const float* rstd, ConstMatrix dy, Matrix dx,
                        Write dx_write, float* dw, float* db, Write dw_write, std::int64_t T, std::int64_t h) {
  HB_CHECK(x.dtype == dy.dtype && x.dtype == dx.dtype, "layernorm_backward: mixed dtypes");
  BlockedWeightGrad grad(ctx, T, 2 * h);
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(w.dtype, [&](auto w_tag) {
      const auto* weight = static_cast<const decltype(w_tag)*>(w.data);
      if (dw == nullptr)
        return parallel_for(ctx, T, rows_grain(h), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t)
            layernorm_backward_row<E>(row<E>(x, t), weight, rstd[t], row<E>(dy, t), row<E>(dx, t),
                                      dx_write == Write::accumulate, nullptr, nullptr, h);
        });
      grad.run(ctx, T, [&](std::int64_t begin, std::int64_t end, float* sum) {
        for (std::int64_t t = begin; t < end; ++t)
          layernorm_backward_row(row<E>(x, t), weight, rstd[t], row<E>(dy, t), row<E>(dx, t),
                                 dx_write == Write::accumulate, sum, sum + h, h);
      });
    });
  });
  if (dw == nullptr) return;
  grad.finish(dw, dw_write, 0, h);
  grad.finish(db, dw_write, h, h);
}

void qk_norm_forward(KernelContext& ctx, ConstMatrix qkv, ConstVector q_norm, ConstVector k_norm, Matrix out,
                     float* rstd, std::int64_t T, HeadShape shape, float eps, float offset) {
  HB_CHECK(qkv.dtype == out.dtype && q_norm.dtype == k_norm.dtype, "qk_norm: mixed dtypes");
  const std::int64_t d = shape.head_dim, heads = shape.num_heads + shape.num_kv_heads;
  with_float_type(qkv.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(q_norm.dtype, [&](auto w_tag) {
      using W = decltype(w_tag);
      parallel_for(ctx, T, rows_grain(2 * shape.width()), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          const E* x = row<E>(qkv, t);
          E* y = row<E>(out, t);
          for (std::int64_t i = 0; i < heads; ++i) {
            const auto* w = static_cast<const W*>(i < shape.num_heads ? q_norm.data : k_norm.data);
            float& r = rstd[t * heads + i];
            r = inverse_rms(x + i * d, d, eps);
            normalize(x + i * d, w, offset, r, y + i * d, d);
          }
          if (x != y) std::copy_n(x + shape.v_offset(), shape.num_kv_heads * d, y + shape.v_offset());
        }
      });
    });
  });
}

void qk_norm_backward(KernelContext& ctx, ConstMatrix qkv, ConstVector q_norm, ConstVector k_norm, const float* rstd,
                      ConstMatrix dout, Matrix dqkv, float* dq_norm, float* dk_norm, Write dw_write, std::int64_t T,
                      HeadShape shape, float offset) {
  HB_CHECK(qkv.dtype == dout.dtype && qkv.dtype == dqkv.dtype && q_norm.dtype == k_norm.dtype,
           "qk_norm_backward: mixed dtypes");
  const std::int64_t d = shape.head_dim, heads = shape.num_heads + shape.num_kv_heads;
  BlockedWeightGrad grad(ctx, T, 2 * d);
  with_float_type(qkv.dtype, [&](auto tag) {
    using E = decltype(tag);
    with_float_type(q_norm.dtype, [&](auto w_tag) {
      using W = decltype(w_tag);
      grad.run(ctx, T, [&](std::int64_t begin, std::int64_t end, float* sum) {
        for (std::int64_t t = begin; t < end; ++t) {
          const E* x = row<E>(qkv, t);
          const E* dy = row<E>(dout, t);
          E* dx = row<E>(dqkv, t);
          for (std::int64_t i = 0; i < heads; ++i) {
            const bool is_q = i < shape.num_heads;
            const auto* w = static_cast<const W*>(is_q ? q_norm.data : k_norm.data);
            backward_row(x + i * d, w, offset, rstd[t * heads + i], dy + i * d, dx + i * d, false, is_q ? sum : sum + d,
                         d);
          }
          if (dy != dx) std::copy_n(dy + shape.v_offset(), shape.num_kv_heads * d, dx + shape.v_offset());
        }
      });
    });
  });
  if (dq_norm) grad.finish(dq_norm, dw_write, 0, d);
  if (dk_norm) grad.finish(dk_norm, dw_write, d, d);
}

}  // namespace hotbunk::kernels
