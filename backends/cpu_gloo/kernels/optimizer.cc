#include "backends/cpu_gloo/kernels/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr std::int64_t kBlock = 8192;  // elements of one double-precision partial sum

HB_INLINE Vf square_root(Vf x) {
#if defined(__AVX512F__)
  return std::bit_cast<Vf>(_mm512_maskz_sqrt_ps(0xffff, std::bit_cast<__m512>(x)));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

}  // namespace

void adamw_step(KernelContext& ctx, const AdamWConfig& c, float* p, ConstVector g, float* m, float* v, std::int64_t n,
                const float* grad_scale, bf16* params_out) {
  HB_CHECK(c.step >= 1, "AdamW steps count from 1, got {}", c.step);
  const float scale = grad_scale ? *grad_scale : 1.0f;
  if (!std::isfinite(scale)) return;
  const double t = static_cast<double>(c.step);
  const double correction1 = 1.0 - std::pow(static_cast<double>(c.beta1), t);
  const double correction2 = 1.0 - std::pow(static_cast<double>(c.beta2), t);
  const float step_size = static_cast<float>(c.lr / correction1);
  const float root_correction2 = static_cast<float>(std::sqrt(correction2));
  const float decay = static_cast<float>(1.0 - static_cast<double>(c.lr) * c.weight_decay);
  const float b1 = c.beta1, b2 = c.beta2;
  with_float_type(g.dtype, [&](auto tag) {
    const auto* grads = static_cast<const decltype(tag)*>(g.data);
    parallel_for(ctx, n, 4096, [&](std::int64_t begin, std::int64_t end) {
      for_vectors(end - begin, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
        const std::int64_t i = begin + j;
        const Vf grad = ld(grads + i) * scale;
        const Vf m_old = ld(m + i);
        const Vf m_new = m_old + (grad - m_old) * (1.0f - b1);
        const Vf v_new = ld(v + i) * b2 + grad * grad * (1.0f - b2);
        const Vf denominator = square_root(v_new) / root_correction2 + c.eps;
        const Vf p_new = ld(p + i) * decay - step_size * (m_new / denominator);
        st(m + i, m_new);
        st(v + i, v_new);
        st(p + i, p_new);
        if (params_out) st(params_out + i, p_new);
      });
    });
  });
}

double sum_of_squares(KernelContext& ctx, ConstVector x, std::int64_t n) {
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks));
  with_float_type(x.dtype, [&](auto tag) {
    parallel_for(ctx, blocks, 2, [&](std::int64_t begin, std::int64_t end) {
      const auto square = [](auto element) {
        const double wide = as_f32(element);
        return wide * wide;
      };
      for (std::int64_t b = begin; b < end; ++b) {
        const auto* p = static_cast<const decltype(tag)*>(x.data) + b * kBlock;
        const std::int64_t count = std::min(kBlock, n - b * kBlock);
        double lanes[kLanes] = {};
        std::int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes)
          for (int l = 0; l < kLanes; ++l) lanes[l] += square(p[i + l]);
        for (int l = 0; i < count; ++i, ++l) lanes[l] += square(p[i]);
        double sum = 0.0;
        for (double lane : lanes) sum += lane;
        partial[static_cast<std::size_t>(b)] = sum;
      }
    });
  });
  double total = 0.0;
  for (double s : partial) total += s;
  return total;
}

float clip_coefficient(double norm, double max_norm) {
  if (!std::isfinite(norm)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6)));
}

}  // namespace hotbunk::kernels
