// Latent attention: what an engine makes of the latents that it keeps has the bits of what training makes of all
// tokens.
#include "backends/cpu_gloo/kernels/latent.h"

#include "backends/cpu_gloo/kernels/attention.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/rope.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

constexpr std::int64_t latent_dim = 10;

/// Tokens of two sequences of 70 and 9, and what keeps their latents: blocks of 8 in another order.
struct Latents {
  static constexpr std::int64_t T = 79, block = 8, max_blocks = 9;
  LatentShape shape{3, 6, 4, 5};
  std::vector<std::int32_t> cu{0, 70, 79}, table, slots;
  Tensor q, c, rotated, w, pool;
  explicit Latents(DType dtype, Random& rng)
      : q(Tensor::random(dtype, T, shape.heads * shape.key(), 0, rng)),
        c(Tensor::random(dtype, T, latent_dim, 0, rng)),
        rotated(Tensor::random(dtype, T, shape.rope, 0, rng)),
        w(Tensor::random(dtype, shape.expanded(), latent_dim, 0, rng)),
        pool(Tensor::filled(dtype, 2 * max_blocks * block, latent_dim + shape.rope, 0, NAN)) {
    for (std::int32_t b = 0; b < 2 * max_blocks; ++b) table.push_back((b * 5 + 3) % (2 * max_blocks));
    for (std::size_t s = 0; s < 2; ++s)
      for (std::int32_t p = 0; p < cu[s + 1] - cu[s]; ++p)
        slots.push_back(table[s * max_blocks + static_cast<std::size_t>(p / block)] * block + p % block);
  }
  KvPool view() { return {pool.data(), pool.dtype(), 2 * max_blocks, block}; }
  static Matrix from(Tensor& t, std::int64_t row) {
    Matrix m = t.matrix();
    m.data = static_cast<char*>(m.data) + row * m.ld * size_of(m.dtype);
    return m;
  }
};

}  // namespace

TEST_CASE("attention over kept latents has the bits of training's: prefill, in chunks, decode, idle slots") {
  for (const int threads : {1, 2}) {
    KernelContext ctx(threads);
    Random rng(41);
    Latents l(DType::f32, rng);
    const HeadShape packed = l.shape.packed();
    const std::int64_t out = l.shape.heads * l.shape.value;
    Tensor kv(DType::f32, Latents::T, l.shape.expanded()), qkv(DType::f32, Latents::T, packed.width());
    Tensor want(DType::f32, Latents::T, out), lse(DType::f32, Latents::T, l.shape.heads);
    linear_forward(ctx, l.c.matrix(), l.w.matrix(), {}, kv.matrix(), Latents::T, l.shape.expanded(), latent_dim);
    latent_heads(ctx, l.q.matrix(), kv.matrix(), l.rotated.matrix(), l.shape, qkv.matrix(), Latents::T);
    attention_forward(ctx, qkv.matrix(), packed, l.cu, 0.3f, want.matrix(), lse.f32());

    latent_write(ctx, l.c.matrix(), latent_dim, l.rotated.matrix(), l.shape.rope, l.slots.data(), Latents::T, l.view());
    const auto attend = [&](std::int64_t row, const std::vector<std::int32_t>& context,
                            const std::vector<std::int32_t>& table, const std::vector<std::int32_t>& cu) {
      Tensor o(DType::f32, cu.back(), out, out + 3);
      latent_paged_attention(ctx, Latents::from(l.q, row), l.shape, l.view(), latent_dim, l.w.matrix(),
                             {table.data(), Latents::max_blocks, context.data()}, cu, 0.3f, o.matrix());
      CHECK(o.padding_intact());
      return o;
    };
    const auto same = [&](const Tensor& o, std::int64_t at) {
      CHECK(error_of(o, [&](auto t, auto j) { return want.at(t + at, j); }) == 0.0);
    };
    same(attend(0, {70, 9}, l.table, l.cu), 0);
    same(attend(41, {70, 9}, l.table, {0, 29, 29}), 41);  // the last 29 of the first sequence, nothing of the other
    same(attend(77, {0, 8}, l.table, {0, 0, 1}), 77);     // one query, whose neighbour has nothing
    const Tensor idle = attend(0, {0, 9}, l.table, {0, 1, 1});
    for (std::int64_t j = 0; j < out; ++j) CHECK(idle.at(0, j) == 0.0);
  }
}

TEST_CASE("attention over kept latents is the same to rounding, whoever multiplies bf16") {
  Random rng(43);
  Latents l(DType::bf16, rng);
  const std::int64_t out = l.shape.heads * l.shape.value;
  std::vector<Tensor> results;
  for (const ProductPath path : {ProductPath::own, ProductPath::wide}) {
    ProductPaths paths;
    paths.by_class.fill(path);
    KernelContext ctx(2, paths);
    latent_write(ctx, l.c.matrix(), latent_dim, l.rotated.matrix(), l.shape.rope, l.slots.data(), Latents::T, l.view());
    Tensor& o = results.emplace_back(DType::bf16, Latents::T, out);
    latent_paged_attention(ctx, l.q.matrix(), l.shape, l.view(), latent_dim, l.w.matrix(),
                           {l.table.data(), Latents::max_blocks, std::vector<std::int32_t>{70, 9}.data()}, l.cu, 0.3f,
                           o.matrix());
  }
  CHECK(error_of(results[1], [&](auto t, auto j) { return results[0].at(t, j); }) <= 0.01);
}

TEST_CASE("what all heads share gets the gradients of all of them, and a rotation of neighbours keeps their length") {
  KernelContext ctx(2);
  Random rng(42);
  for (const DType dtype : kFloatTypes) {
    const LatentShape shape{3, 6, 4, 5};
    const HeadShape packed = shape.packed();
    const Tensor d_qkv = Tensor::random(dtype, 20, packed.width(), packed.width() + 3, rng);
    Tensor d_q(dtype, 20, packed.k_offset()), d_kv(dtype, 20, shape.expanded()), d_shared(dtype, 20, shape.rope);
    latent_heads_backward(ctx, d_qkv.matrix(), shape, d_q.matrix(), d_kv.matrix(), d_shared.matrix(), 20);
    check_close(
        d_shared,
        [&](auto t, auto i) {
          double sum = 0;
          for (std::int64_t h = 0; h < shape.heads; ++h)
            sum += d_qkv.at(t, packed.k_offset() + h * shape.key() + shape.nope + i);
          return sum;
        },
        dtype == DType::f32 ? kF32Tolerance : 4e-3);
    CHECK(error_of(d_kv, [&](auto t, auto i) {
            const std::int64_t h = i / (shape.nope + shape.value), k = i % (shape.nope + shape.value);
            return k < shape.nope ? d_qkv.at(t, packed.k_offset() + h * shape.key() + k)
                                  : d_qkv.at(t, packed.v_offset() + h * shape.value + k - shape.nope);
          }) == 0.0);
  }
  // Position 3, frequencies 0.5 and 0.1: (x0, x1) by 1.5 rad, (x2, x3) by 0.3; the head's first two numbers stay.
  Tensor x = Tensor::filled(DType::f32, 1, 6, 0, 1.0);
  const std::int32_t position = 3;
  const float frequencies[] = {0.5f, 0.1f};
  rope_neighbours(ctx, x.matrix(), &position, frequencies, 1, 1, 6, 4, RopeDirection::forward);
  const double turned[] = {1.0,
                           1.0,
                           std::cos(1.5) - std::sin(1.5),
                           std::cos(1.5) + std::sin(1.5),
                           std::cos(0.3) - std::sin(0.3),
                           std::cos(0.3) + std::sin(0.3)};
  for (std::int64_t j = 0; j < 6; ++j) CHECK(x.at(0, j) == Approx(turned[j]).epsilon(1e-6));
  rope_neighbours(ctx, x.matrix(), &position, frequencies, 1, 1, 6, 4, RopeDirection::backward);
  for (std::int64_t j = 0; j < 6; ++j) CHECK(x.at(0, j) == Approx(1.0).epsilon(1e-6));
}
