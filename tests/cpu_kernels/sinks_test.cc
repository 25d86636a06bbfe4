#include "backends/cpu_gloo/kernels/sinks.h"

#include <cmath>
#include <vector>

#include "backends/cpu_gloo/kernels/attention.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

/// Attention of one sequence with a sink for each head, by its definition, in double: o [T][a·d].
std::vector<std::vector<double>> attended(const Tensor& qkv, const HeadShape& shape, std::int64_t T, double scale,
                                          const Tensor& sinks) {
  const std::int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  std::vector out(static_cast<std::size_t>(T), std::vector<double>(static_cast<std::size_t>(shape.num_heads * d)));
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < shape.num_heads; ++h) {
      const std::int64_t k = shape.k_offset() + h / group * d, v = shape.v_offset() + h / group * d;
      double sum = std::exp(sinks.at(0, h));
      std::vector<double> weights;
      for (std::int64_t s = 0; s <= t; ++s) {
        double score = 0;
        for (std::int64_t j = 0; j < d; ++j) score += qkv.at(t, h * d + j) * qkv.at(s, k + j);
        weights.push_back(std::exp(scale * score)), sum += weights.back();
      }
      for (std::int64_t s = 0; s <= t; ++s)
        for (std::int64_t j = 0; j < d; ++j)
          out[static_cast<std::size_t>(t)][static_cast<std::size_t>(h * d + j)] +=
              weights[static_cast<std::size_t>(s)] / sum * qkv.at(s, v + j);
    }
  return out;
}

}  // namespace

TEST_CASE("attention with sinks is a softmax over one more score, and so are its gradients") {
  Random rng(81);
  const HeadShape shape{4, 2, 6};
  constexpr std::int64_t T = 13, width = 24;
  const std::vector<std::int32_t> cu{0, T};
  for (const DType dtype : kFloatTypes) {
    CAPTURE(name_of(dtype));
    KernelContext ctx(2);
    Tensor qkv = Tensor::random(dtype, T, shape.width(), 0, rng), sinks = Tensor::random(dtype, 1, 4, 4, rng, 2.0);
    const Tensor d_o = Tensor::random(dtype, T, width, width + 2, rng);
    Tensor o(dtype, T, width, width + 3), lse(DType::f32, T, 4), d_sinks(DType::f32, 1, 4),
        d_qkv(dtype, T, shape.width());
    attention_forward(ctx, qkv.matrix(), shape, cu, 0.5f, o.matrix(), lse.f32());
    attention_sinks(ctx, o.matrix(), lse.f32(), sinks.vector(), T, 4, 6);
    const auto want = attended(qkv, shape, T, 0.5, sinks);
    // Of bf16 what attention left was rounded before.
    check_close(
        o, [&](auto t, auto c) { return want[static_cast<std::size_t>(t)][static_cast<std::size_t>(c)]; },
        dtype == DType::f32 ? kF32Tolerance : 4e-3);
    CHECK(o.padding_intact());

    attention_sinks_backward(ctx, d_o.matrix(), o.matrix(), lse.f32(), sinks.vector(), d_sinks.f32(), T, 4, 6,
                             Write::overwrite);
    attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.f32(), shape, cu, 0.5f, d_qkv.matrix());
    if (dtype != DType::f32) continue;
    const auto objective = [&] {
      const auto found = attended(qkv, shape, T, 0.5, sinks);
      double sum = 0;
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t c = 0; c < width; ++c)
          sum += found[static_cast<std::size_t>(t)][static_cast<std::size_t>(c)] * d_o.at(t, c);
      return sum;
    };
    const auto slope = [&](Tensor& of, std::int64_t r, std::int64_t c) {
      const double x = of.at(r, c), h = 1.0 / 1024;  // exact in fp32 next to values of unit size, up to 2⁻²⁴
      of.set(r, c, x + h);
      const double up_at = of.at(r, c), up = objective();
      of.set(r, c, x - h);
      const double down_at = of.at(r, c), down = objective();
      of.set(r, c, x);
      return (up - down) / (up_at - down_at);
    };
    for (std::int64_t h = 0; h < 4; ++h) CHECK(d_sinks.at(0, h) == Approx(slope(sinks, 0, h)).margin(2e-5));
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t c = 0; c < shape.width(); ++c) CHECK(d_qkv.at(t, c) == Approx(slope(qkv, t, c)).margin(2e-5));
    const Tensor once = d_sinks;
    attention_sinks_backward(ctx, d_o.matrix(), o.matrix(), lse.f32(), sinks.vector(), d_sinks.f32(), T, 4, 6,
                             Write::accumulate);
    for (std::int64_t h = 0; h < 4; ++h) CHECK(d_sinks.at(0, h) == Approx(2 * once.at(0, h)).epsilon(1e-6));
  }
}

TEST_CASE("a query without keys gets nothing beside a sink either") {
  KernelContext ctx(1);
  Tensor o(DType::f32, 1, 4), lse(DType::f32, 1, 2), sinks(DType::f32, 1, 2);
  for (std::int64_t c = 0; c < 4; ++c) o.set(0, c, 0.0);
  for (std::int64_t h = 0; h < 2; ++h) lse.f32()[h] = -INFINITY, sinks.set(0, h, 0.25);
  attention_sinks(ctx, o.matrix(), lse.f32(), sinks.vector(), 1, 2, 2);
  for (std::int64_t c = 0; c < 4; ++c) CHECK(o.at(0, c) == 0.0);
  for (std::int64_t h = 0; h < 2; ++h) CHECK(lse.f32()[h] == 0.25f);
}
