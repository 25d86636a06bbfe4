// AdamW, norms, reductions, the vector maths beneath, and determinism of everything that sums.
#include "backends/cpu_gloo/kernels/optimizer.h"

#include <cmath>
#include <limits>
#include <string>

#include "backends/cpu_gloo/kernels/attention.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/reduce.h"
#include "backends/cpu_gloo/kernels/simd.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

TEST_CASE("AdamW takes torch's steps, with gradient scale and bf16 copy") {
  KernelContext ctx(2);
  Random rng(61);
  for (const auto& [n, grads] : {std::pair{0, DType::f32}, {1, DType::f32}, {9001, DType::f32}, {9001, DType::bf16}}) {
    const AdamWConfig base{.lr = 3e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
    Tensor p = Tensor::random(DType::f32, 1, n, 0, rng), m = Tensor::filled(DType::f32, 1, n, 0, 0.0), v = m;
    std::vector<double> wp, wm(static_cast<std::size_t>(n)), wv(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) wp.push_back(p.at(0, i));
    Tensor out(DType::bf16, 1, n);
    const float scale = 0.37f;
    for (std::int64_t step = 1; step <= 4; ++step) {
      const Tensor g = Tensor::random(grads, 1, n, 0, rng);
      AdamWConfig config = base;
      config.step = step;
      adamw_step(ctx, config, p.f32(), g.vector(), m.f32(), v.f32(), n, step == 2 ? nullptr : &scale,
                 static_cast<bf16*>(out.data()));
      for (std::int64_t i = 0; i < n; ++i) {  // the definition (Loshchilov & Hutter 2019), in double
        const double grad = g.at(0, i) * (step == 2 ? 1.0 : static_cast<double>(scale));
        wm[i] = base.beta1 * wm[i] + (1.0 - base.beta1) * grad;
        wv[i] = base.beta2 * wv[i] + (1.0 - base.beta2) * grad * grad;
        const double mh = wm[i] / (1 - std::pow(base.beta1, step)), vh = wv[i] / (1 - std::pow(base.beta2, step));
        wp[i] =
            wp[i] * (1 - static_cast<double>(base.lr) * base.weight_decay) - base.lr * mh / (std::sqrt(vh) + base.eps);
      }
      check_close(
          p, [&](auto, auto i) { return wp[i]; }, 1e-6);
      check_close(
          m, [&](auto, auto i) { return wm[i]; }, 1e-6);
      check_close(
          v, [&](auto, auto i) { return wv[i]; }, 1e-6);
    }
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < n; ++i) wrong += out.at(0, i) != to_f32(to_bf16(static_cast<float>(p.at(0, i))));
    CHECK(wrong == 0);
    CHECK(out.padding_intact());
  }
}

TEST_CASE("a step that is refused changes nothing") {
  KernelContext ctx(2);
  Random rng(64);
  const std::int64_t n = 9001;
  Tensor p = Tensor::random(DType::f32, 1, n, 0, rng), m = Tensor::random(DType::f32, 1, n, 0, rng),
         v = Tensor::filled(DType::f32, 1, n, 0, 1.0);
  const Tensor g = Tensor::random(DType::f32, 1, n, 0, rng);
  const auto bits = [&] {
    std::string all;
    for (Tensor* t : {&p, &m, &v}) all.append(reinterpret_cast<const char*>(t->f32()), static_cast<std::size_t>(n) * 4);
    return all;
  };
  const std::string before = bits();
  for (const double norm : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const float scale = clip_coefficient(norm, 1.0);
    CHECK(std::isnan(scale));
    adamw_step(ctx, {}, p.f32(), g.vector(), m.f32(), v.f32(), n, &scale, nullptr);
    CHECK(bits() == before);
  }
  const float one = 1.0f;
  adamw_step(ctx, {}, p.f32(), g.vector(), m.f32(), v.f32(), n, &one, nullptr);
  CHECK(bits() != before);
}

TEST_CASE("sum of squares: right, and the same bits for every number of threads") {
  Random rng(62);
  for (const auto& [n, dtype] :
       {std::pair{0, DType::f32}, {1, DType::f32}, {8191, DType::f32}, {8193, DType::bf16}, {100'003, DType::f32}}) {
    const Tensor x = Tensor::random(dtype, 1, n, 0, rng);
    double want = 0.0;
    for (std::int64_t i = 0; i < n; ++i) want += x.at(0, i) * x.at(0, i);
    KernelContext c1(1), c2(2), c3(3);
    const double got = sum_of_squares(c1, x.vector(), n);
    CHECK(got == Approx(want).epsilon(1e-13));
    CHECK(got == sum_of_squares(c2, x.vector(), n));
    CHECK(got == sum_of_squares(c3, x.vector(), n));
  }
  CHECK(clip_coefficient(0.5, 1.0) == 1.0f);
  CHECK(clip_coefficient(4.0, 1.0) == Approx(0.25));
  CHECK(clip_coefficient(0.0, 1.0) == 1.0f);
}

TEST_CASE("reduce_sum adds in rank order, in place or apart, over what was there or not") {
  KernelContext ctx(2);
  Random rng(63);
  for (DType dtype : kFloatTypes)
    for (std::int64_t n : {0, 1, 40'001})
      for (int ranks : {1, 4})
        for (Write write : {Write::overwrite, Write::accumulate}) {
          CAPTURE(name_of(dtype), n, ranks);
          std::vector<Tensor> in;
          std::vector<const void*> pointers;
          for (int r = 0; r < ranks; ++r) in.push_back(Tensor::random(dtype, 1, n, 0, rng));
          for (const Tensor& t : in) pointers.push_back(t.bytes().data());
          const Tensor old = Tensor::random(dtype, 1, n, 0, rng);
          Tensor out = old;
          reduce_sum(ctx, pointers, dtype, out.data(), n, write);
          // Rank order exactly: a chain of fp32 additions, rounded to the dtype once.
          std::int64_t wrong = 0;
          for (std::int64_t i = 0; i < n; ++i) {
            float sum = write == Write::accumulate ? static_cast<float>(old.at(0, i)) : 0.0f;
            for (const Tensor& t : in) sum += static_cast<float>(t.at(0, i));
            wrong += out.at(0, i) != (dtype == DType::f32 ? sum : to_f32(to_bf16(sum)));
          }
          CHECK(wrong == 0);
          CHECK(out.padding_intact());
          if (write == Write::overwrite) {
            Tensor& first = in[0];
            reduce_sum(ctx, pointers, dtype, first.data(), n);
            CHECK(first.bytes() == out.bytes());
          }
        }
  const std::int32_t a[] = {1, -5, 2147483647}, b[] = {2, 3, 1};
  std::int32_t out[3];
  const void* both[] = {a, b};
  reduce_sum(ctx, both, DType::i32, out, 3);
  CHECK(out[0] == 3);
  CHECK(out[1] == -2);
  CHECK(out[2] == -2147483648LL);  // wraps, defined
  reduce_max(ctx, both, DType::i32, out, 3);
  CHECK(out[0] == 2);
  CHECK(out[1] == 3);
  const float x[] = {1, NAN, -3}, y[] = {0, 2, -2};
  float most[3];
  const void* floats[] = {x, y};
  reduce_max(ctx, floats, DType::f32, most, 3);
  CHECK(most[0] == 1.0f);
  CHECK(std::isnan(most[1]));
  CHECK(most[2] == -2.0f);
  CHECK_THROWS(reduce_sum(ctx, floats, DType::u8, most, 3));
  CHECK_THROWS(reduce_max(ctx, {}, DType::f32, most, 3));
}

TEST_CASE("vector exp is within 2 ulp, right at the edges") {
  double worst = 0.0;
  for (double x = -87.0; x < 88.7; x += 0.00137) {
    const auto f = static_cast<float>(x);
    const float got = kernels::exp(splat(f))[0];
    const double want = std::exp(static_cast<double>(f));
    const double ulp =
        std::nextafter(static_cast<float>(want), INFINITY) - static_cast<double>(static_cast<float>(want));
    worst = std::max(worst, std::abs(got - want) / ulp);
  }
  CHECK(worst <= 2.0);
  CHECK(kernels::exp(splat(0.0f))[0] == 1.0f);
  CHECK(kernels::exp(splat(-INFINITY))[0] == 0.0f);
  CHECK(kernels::exp(splat(-1000.0f))[0] == 0.0f);
  CHECK(kernels::exp(splat(INFINITY))[0] == INFINITY);
  CHECK(kernels::exp(splat(89.0f))[0] == INFINITY);
  CHECK(std::isnan(kernels::exp(splat(NAN))[0]));
}

TEST_CASE("vector tanh is within 4 ulp, right at the edges") {
  double worst = 0.0;
  for (double x = 1e-6; x < 20.0; x *= 1.0011) {
    const auto f = static_cast<float>(x);
    const double want = std::tanh(static_cast<double>(f));
    const double ulp =
        std::nextafter(static_cast<float>(want), INFINITY) - static_cast<double>(static_cast<float>(want));
    worst = std::max(worst, std::abs(kernels::tanh(splat(f))[0] - want) / ulp);
    CHECK(kernels::tanh(splat(-f))[0] == Approx(-want).epsilon(1e-6));
  }
  CHECK(worst <= 4.0);
  CHECK(kernels::tanh(splat(0.0f))[0] == 0.0f);
  CHECK(kernels::tanh(splat(INFINITY))[0] == 1.0f);
  CHECK(kernels::tanh(splat(-INFINITY))[0] == -1.0f);
  CHECK(std::isnan(kernels::tanh(splat(NAN))[0]));
}

TEST_CASE("two runs with two threads give the same bits") {
  const auto run = [] {
    KernelContext ctx(2);
    Random rng(64);
    const HeadShape shape{4, 2, 32};
    const std::int64_t T = 200, width = shape.width(), out = 128;
    const Tensor qkv = Tensor::random(DType::bf16, T, width, 0, rng), d_o = Tensor::random(DType::bf16, T, out, 0, rng);
    Tensor o(DType::bf16, T, out), lse(DType::f32, T, 4), dqkv(DType::bf16, T, width), dw(DType::f32, width, out);
    const std::vector<std::int32_t> cu{0, 77, 200};
    attention_forward(ctx, qkv.matrix(), shape, cu, 0.2f, o.matrix(), lse.f32());
    attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.f32(), shape, cu, 0.2f, dqkv.matrix());
    linear_wgrad(ctx, dqkv.matrix(), o.matrix(), dw.matrix(), T, width, out, Write::overwrite);
    const Tensor x = Tensor::random(DType::f32, T, 512, 0, rng), w = Tensor::random(DType::f32, 300, 512, 0, rng);
    Tensor y(DType::f32, T, 300);
    linear_forward(ctx, x.matrix(), w.matrix(), {}, y.matrix(), T, 300, 512);
    return std::tuple{o.bytes(), lse.bytes(), dqkv.bytes(), dw.bytes(), y.bytes()};
  };
  CHECK(run() == run());
}

TEST_CASE("a context's scratch memory grows, stays, and is given back") {
  KernelContext ctx(1);
  CHECK(ctx.scratch_bytes() == 0);
  void* first = ctx.scratch(0, 1000);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
  CHECK(ctx.scratch(0, 10) == first);
  CHECK(ctx.scratch_bytes() == 1000);
  ctx.release();
  CHECK(ctx.scratch_bytes() == 0);
  CHECK_THROWS(ctx.scratch(KernelContext::kNumSlots, 1));
  CHECK_THROWS(KernelContext(0));
}
