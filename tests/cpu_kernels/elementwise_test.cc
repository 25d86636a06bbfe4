#include "backends/cpu_gloo/kernels/elementwise.h"

#include <rapidcheck.h>

#include <cmath>
#include <numbers>
#include <numeric>

#include "base/hash.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

TEST_CASE("swiglu forward and backward, odd widths, backward in place") {
  KernelContext ctx(2);
  Random rng(41);
  for (DType dtype : kFloatTypes)
    for (std::int64_t T : {0, 1, 33})
      for (std::int64_t i : {1, 31, 200}) {
        CAPTURE(name_of(dtype), T, i);
        const Tensor gu = Tensor::random(dtype, T, 2 * i, 2 * i + 3, rng, 4.0);
        const Tensor dact = Tensor::random(dtype, T, i, i + 1, rng);
        Tensor act(dtype, T, i, i + 2), in_place = gu;
        swiglu_forward(ctx, gu.matrix(), act.matrix(), T, i);
        check_close(
            act, [&](auto t, auto j) { return gu.at(t, j) * sigmoid(gu.at(t, j)) * gu.at(t, i + j); }, kF32Tolerance);
        swiglu_backward(ctx, dact.matrix(), in_place.matrix(), in_place.matrix(), T, i);
        check_close(
            in_place,
            [&](auto t, auto c) {
              const std::int64_t j = c % i;
              const double dy = dact.at(t, j), u = gu.at(t, i + j);
              const auto silu = [&](double x) { return x * sigmoid(x); };
              if (c >= i) return dy * silu(gu.at(t, j));
              const double h = 1e-5;  // finite difference of silu
              return dy * u * (silu(gu.at(t, j) + h) - silu(gu.at(t, j) - h)) / (2 * h);
            },
            kF32Tolerance);
      }
  Tensor extreme(DType::f32, 1, 4);  // saturated gates are exact, not NaN
  for (int c = 0; c < 4; ++c) extreme.set(0, c, c == 0 ? 200.0 : c == 1 ? -200.0 : 3.0);
  Tensor act(DType::f32, 1, 2);
  swiglu_forward(ctx, extreme.matrix(), act.matrix(), 1, 2);
  CHECK(act.at(0, 0) == 600.0);
  CHECK(act.at(0, 1) == 0.0);
}

TEST_CASE("geglu forward and backward, odd widths, backward in place") {
  KernelContext ctx(2);
  Random rng(44);
  const auto gelu = [](double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  };
  for (DType dtype : kFloatTypes)
    for (std::int64_t T : {0, 1, 33})
      for (std::int64_t i : {1, 31, 200}) {
        CAPTURE(name_of(dtype), T, i);
        const Tensor gu = Tensor::random(dtype, T, 2 * i, 2 * i + 3, rng, 3.0);
        const Tensor dact = Tensor::random(dtype, T, i, i + 1, rng);
        Tensor act(dtype, T, i, i + 2), in_place = gu;
        geglu_forward(ctx, gu.matrix(), act.matrix(), T, i);
        check_close(
            act, [&](auto t, auto j) { return gelu(gu.at(t, j)) * gu.at(t, i + j); }, kF32Tolerance);
        geglu_backward(ctx, dact.matrix(), in_place.matrix(), in_place.matrix(), T, i);
        check_close(
            in_place,
            [&](auto t, auto c) {
              const std::int64_t j = c % i;
              const double dy = dact.at(t, j), u = gu.at(t, i + j);
              if (c >= i) return dy * gelu(gu.at(t, j));
              const double h = 1e-5;  // finite difference
              return dy * u * (gelu(gu.at(t, j) + h) - gelu(gu.at(t, j) - h)) / (2 * h);
            },
            kF32Tolerance);
      }
  Tensor extreme(DType::f32, 1, 4);  // saturated gates are exact, not NaN
  for (int c = 0; c < 4; ++c) extreme.set(0, c, c == 0 ? 200.0 : c == 1 ? -200.0 : 3.0);
  Tensor act(DType::f32, 1, 2);
  geglu_forward(ctx, extreme.matrix(), act.matrix(), 1, 2);
  CHECK(act.at(0, 0) == 600.0);
  CHECK(act.at(0, 1) == 0.0);
}

TEST_CASE("clamped swiglu forward and backward, odd widths, backward in place") {
  KernelContext ctx(2);
  Random rng(47);
  const ClampedGate by{1.5f, 1.702f};
  const auto gate = [](double x) {
    const double g = std::min(x, 1.5);
    return g / (1.0 + std::exp(-static_cast<double>(1.702f) * g));
  };
  const auto up = [](double x) { return std::clamp(x, -1.5, 1.5) + 1.0; };
  for (DType dtype : kFloatTypes)
    for (std::int64_t T : {0, 1, 33})
      for (std::int64_t i : {1, 31, 200}) {
        CAPTURE(name_of(dtype), T, i);
        const Tensor gu = Tensor::random(dtype, T, 2 * i, 2 * i + 3, rng, 3.0);  // about a half is clamped
        const Tensor dact = Tensor::random(dtype, T, i, i + 1, rng);
        Tensor act(dtype, T, i, i + 2), in_place = gu;
        clamped_swiglu_forward(ctx, gu.matrix(), act.matrix(), T, i, by);
        check_close(
            act, [&](auto t, auto j) { return gate(gu.at(t, j)) * up(gu.at(t, i + j)); }, kF32Tolerance);
        clamped_swiglu_backward(ctx, dact.matrix(), in_place.matrix(), in_place.matrix(), T, i, by);
        check_close(
            in_place,
            [&](auto t, auto c) {
              const std::int64_t j = c % i;
              const double dy = dact.at(t, j), g = gu.at(t, j), u = gu.at(t, i + j);
              if (c >= i) return u < -1.5 || u > 1.5 ? 0.0 : dy * gate(g);
              const double h = 1e-5;  // finite difference, where nothing bends
              return g > 1.5 ? 0.0
                             : dy * up(u) * (gate(g) - gate(g - h) + (g + h > 1.5 ? 0.0 : gate(g + h) - gate(g))) /
                                   (g + h > 1.5 ? h : 2 * h);
            },
            kF32Tolerance);
      }
}

TEST_CASE("gelu forward and backward, odd widths, backward in place") {
  KernelContext ctx(2);
  Random rng(46);
  const auto gelu = [](double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  };
  for (DType dtype : kFloatTypes)
    for (std::int64_t T : {0, 1, 33})
      for (std::int64_t i : {1, 31, 200}) {
        CAPTURE(name_of(dtype), T, i);
        const Tensor x = Tensor::random(dtype, T, i, i + 3, rng, 3.0), dy = Tensor::random(dtype, T, i, i + 1, rng);
        Tensor y(dtype, T, i, i + 2), of_dy = dy, of_x = x;
        gelu_forward(ctx, x.matrix(), y.matrix(), T, i);
        check_close(
            y, [&](auto t, auto j) { return gelu(x.at(t, j)); }, kF32Tolerance);
        const auto derivative = [&](auto t, auto j) {
          const double h = 1e-5;  // finite difference
          return dy.at(t, j) * (gelu(x.at(t, j) + h) - gelu(x.at(t, j) - h)) / (2 * h);
        };
        gelu_backward(ctx, of_dy.matrix(), x.matrix(), of_dy.matrix(), T, i);
        check_close(of_dy, derivative, kF32Tolerance);
        gelu_backward(ctx, dy.matrix(), of_x.matrix(), of_x.matrix(), T, i);
        check_close(of_x, derivative, kF32Tolerance);
      }
  Tensor extreme(DType::f32, 1, 2);  // saturated: exact, not NaN
  extreme.set(0, 0, 200.0), extreme.set(0, 1, -200.0);
  Tensor y(DType::f32, 1, 2);
  gelu_forward(ctx, extreme.matrix(), y.matrix(), 1, 2);
  CHECK(y.at(0, 0) == 200.0);
  CHECK(y.at(0, 1) == 0.0);
}

TEST_CASE("softcap bends what is near the cap and keeps what is small") {
  KernelContext ctx(2);
  Random rng(45);
  for (std::int64_t n : {1, 31, 70000}) {
    const Tensor x = Tensor::random(DType::f32, 1, n, n, rng, 60.0);
    Tensor y = x;
    softcap(ctx, y.f32(), n, 30.0f);
    check_close(
        y, [&](auto, auto c) { return 30.0 * std::tanh(x.at(0, c) / 30.0); }, kF32Tolerance);
  }
}

TEST_CASE("add and add_bias over dense and strided matrices of either dtype") {
  KernelContext ctx(2);
  Random rng(42);
  for (DType d_type : kFloatTypes)
    for (DType s_type : kFloatTypes)
      for (std::int64_t rows : {0, 1, 129})
        for (std::int64_t cols : {1, 17, 300})
          for (std::int64_t pad : {0, 3}) {
            CAPTURE(name_of(d_type), name_of(s_type), rows, cols, pad);
            const Tensor old = Tensor::random(d_type, rows, cols, cols + pad, rng);
            const Tensor src = Tensor::random(s_type, rows, cols, cols + pad, rng);
            const Tensor bias = Tensor::random(s_type, 1, cols, cols, rng);
            Tensor sum = old, biased = old;
            add(ctx, sum.matrix(), src.matrix(), rows, cols);
            check_close(
                sum, [&](auto r, auto c) { return old.at(r, c) + src.at(r, c); }, 1e-7);
            add_bias(ctx, biased.matrix(), bias.vector(), rows, cols);
            check_close(
                biased, [&](auto r, auto c) { return old.at(r, c) + bias.at(0, c); }, 1e-7);
          }
}

TEST_CASE("scale, zero, copy") {
  KernelContext ctx(2);
  Random rng(43);
  for (DType dtype : kFloatTypes)
    for (std::int64_t n : {0, 1, 50001}) {
      const Tensor x = Tensor::random(dtype, 1, n, n, rng);
      Tensor scaled = x, zeroed = x, copied(dtype, 1, n);
      scale(ctx, scaled.data(), dtype, n, -0.3f);
      check_close(
          scaled, [&](auto, auto c) { return x.at(0, c) * -0.3f; }, 1e-7);
      zero(ctx, zeroed.data(), n * size_of(dtype));
      check_close(
          zeroed, [](auto, auto) { return 0.0; }, 0.0);
      copy(ctx, x.bytes().data(), copied.data(), n * size_of(dtype));
      CHECK(copied.bytes() == x.bytes());
    }
}

TEST_CASE("cast rounds every fp32 bit pattern class as base/dtype.h does, and widens exactly") {
  KernelContext ctx(2);
  std::vector<float> x;
  Random rng(44);
  for (std::uint32_t high = 0; high < 0x10000; high += 7)  // signs, exponents, denormals, infinities, NaNs
    for (std::uint32_t low : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  std::vector<std::uint16_t> narrow(x.size());
  cast(ctx, {x.data(), DType::f32}, narrow.data(), DType::bf16, std::ssize(x));
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < x.size(); ++i) wrong += narrow[i] != to_bf16(x[i]).bits;
  CHECK(wrong == 0);
  std::vector<float> wide(x.size());
  cast(ctx, {narrow.data(), DType::bf16}, wide.data(), DType::f32, std::ssize(x));
  for (std::size_t i = 0; i < x.size(); ++i)
    wrong += std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(to_f32(bf16{narrow[i]}));
  CHECK(wrong == 0);
}

TEST_CASE("box copy and comparison: random non-overlapping boxes, with and without a cast") {
  CHECK(rc::check("equals element by element, touches nothing else, and the hash finds every change", [] {
    KernelContext ctx(1 + *rc::gen::inRange(0, 2));
    const DType s_type = *rc::gen::elementOf(std::vector<DType>{DType::f32, DType::bf16});
    const DType d_type = *rc::gen::elementOf(std::vector<DType>{DType::f32, DType::bf16});
    Random rng(45);
    const std::int64_t num = *rc::gen::inRange(0, 6), ld = 64;
    std::vector<Box> boxes;  // box b owns the destination rows [10 b, 10 b + 10) and lies anywhere in them
    for (std::int64_t b = 0; b < num; ++b) {
      const std::int64_t rows = *rc::gen::inRange(0, 11), cols = *rc::gen::inRange(0, 40);
      boxes.push_back({.src_off = *rc::gen::inRange(0, 300),
                       .src_pitch = *rc::gen::inRange(0, 90),
                       .dst_off = 10 * b * ld + *rc::gen::inRange(0, 24),
                       .dst_pitch = ld,
                       .rows = rows,
                       .cols = cols});
    }
    const Tensor src = Tensor::random(s_type, 1, 1500, 0, rng);
    const Tensor old = Tensor::random(d_type, 1, 10 * num * ld, 0, rng);
    Tensor want = old, dst = old;
    std::int64_t elements = 0;
    for (const Box& b : boxes)
      for (std::int64_t r = 0; r < b.rows; ++r)
        for (std::int64_t c = 0; c < b.cols; ++c, ++elements)
          want.set(0, b.dst_off + r * b.dst_pitch + c, src.at(0, b.src_off + r * b.src_pitch + c));
    copy_boxes(ctx, src.vector(), dst.data(), d_type, boxes);
    RC_ASSERT(dst.bytes() == want.bytes());
    // The copies hash as their sources do once those are cast; the index of an element is its place in dst.
    std::uint64_t sum = 0;
    std::vector<Box> copies;
    for (const Box& b : boxes) {
      copies.push_back({b.dst_off, b.dst_pitch, b.dst_off, b.dst_pitch, b.rows, b.cols});
      for (std::int64_t r = 0; r < b.rows; ++r)
        for (std::int64_t c = 0; c < b.cols; ++c) {
          const std::int64_t index = b.dst_off + r * b.dst_pitch + c;
          std::uint32_t bits = 0;
          std::memcpy(&bits, static_cast<const char*>(dst.data()) + index * size_of(d_type),
                      static_cast<std::size_t>(size_of(d_type)));
          sum += element_hash(static_cast<std::uint64_t>(index), bits);
        }
    }
    RC_ASSERT(hash_boxes(ctx, src.vector(), d_type, boxes) == sum);
    RC_ASSERT(hash_boxes(ctx, dst.vector(), d_type, copies) == sum);
    // Flip one bit of the first element of a non-empty box.
    for (const Box& b : boxes) {
      if (b.rows == 0 || b.cols == 0) continue;
      static_cast<unsigned char*>(dst.data())[b.dst_off * size_of(d_type)] ^= 1;
      RC_ASSERT(hash_boxes(ctx, dst.vector(), d_type, copies) != sum);
      static_cast<unsigned char*>(dst.data())[b.dst_off * size_of(d_type)] ^= 1;
    }
  }));
}

TEST_CASE("box copy moves integers, splits one long row over threads, and hashes NaN by bits") {
  KernelContext ctx(2);
  std::vector<std::int64_t> src(200'000), dst(200'000, -1);
  std::iota(src.begin(), src.end(), 0);
  const Box whole{.rows = 1, .cols = 200'000};
  copy_boxes(ctx, {src.data(), DType::i64}, dst.data(), DType::i64, {&whole, 1});
  CHECK(src == dst);
  const float nan_a = std::bit_cast<float>(0x7fc00001u), nan_b = std::bit_cast<float>(0x7fc00002u);
  const Box one{.rows = 1, .cols = 1};
  CHECK(hash_boxes(ctx, {&nan_a, DType::f32}, DType::f32, {&one, 1}) == element_hash(0, 0x7fc00001u));
  CHECK(hash_boxes(ctx, {&nan_b, DType::f32}, DType::f32, {&one, 1}) == element_hash(0, 0x7fc00002u));
  // A tensor's hash is the sum of its parts', wherever they are cut.
  const std::vector<float> x(100'000, 1.5f);
  const Box all{.rows = 1, .cols = 100'000}, head{.rows = 1, .cols = 777};
  const Box tail{.src_off = 777, .dst_off = 777, .rows = 1, .cols = 100'000 - 777};
  const ConstVector v{x.data(), DType::f32};
  CHECK(hash_boxes(ctx, v, DType::bf16, {&all, 1}) ==
        hash_boxes(ctx, v, DType::bf16, {&head, 1}) + hash_boxes(ctx, v, DType::bf16, {&tail, 1}));
}

TEST_CASE("find_nonfinite counts NaN and infinity and names the first") {
  KernelContext ctx(2);
  for (DType dtype : kFloatTypes) {
    Tensor x = Tensor::filled(dtype, 1, 50000, 0, 1e38);
    CHECK(find_nonfinite(ctx, x.vector(), 50000).count == 0);
    CHECK(find_nonfinite(ctx, x.vector(), 50000).first == -1);
    x.set(0, 49999, NAN);
    x.set(0, 12345, -INFINITY);
    x.set(0, 30000, INFINITY);
    const NonFinite found = find_nonfinite(ctx, x.vector(), 50000);
    CHECK(found.count == 3);
    CHECK(found.first == 12345);
    CHECK(find_nonfinite(ctx, x.vector(), 0).count == 0);
  }
}

TEST_CASE(
    "an activation has the same bits in whichever column it stands: among four vectors, in one, behind the last") {
  KernelContext ctx(1);
  constexpr std::int64_t i = 97;  // with 8 lanes 3 · 32 + 1, with 16 64 + 2 · 16 + 1
  for (DType dtype : kFloatTypes)
    for (const double gate : {0.7, -3.3, 5.9}) {
      Tensor gate_up(dtype, 1, 2 * i), dact(dtype, 1, i);
      for (std::int64_t j = 0; j < i; ++j) gate_up.set(0, j, gate), gate_up.set(0, i + j, 1.7), dact.set(0, j, -0.3);
      Tensor act(dtype, 1, i), d(dtype, 1, 2 * i);
      const auto same = [&](const char* what) {
        CAPTURE(name_of(dtype), gate, what);
        for (std::int64_t j = 1; j < i; ++j) {
          CHECK(act.at(0, j) == act.at(0, 0));
          CHECK((d.at(0, j) == d.at(0, 0) && d.at(0, i + j) == d.at(0, i)));
        }
      };
      swiglu_forward(ctx, gate_up.matrix(), act.matrix(), 1, i);
      swiglu_backward(ctx, dact.matrix(), gate_up.matrix(), d.matrix(), 1, i);
      same("swiglu");
      geglu_forward(ctx, gate_up.matrix(), act.matrix(), 1, i);
      geglu_backward(ctx, dact.matrix(), gate_up.matrix(), d.matrix(), 1, i);
      same("geglu");
      clamped_swiglu_forward(ctx, gate_up.matrix(), act.matrix(), 1, i, {4.0f, 1.702f});
      clamped_swiglu_backward(ctx, dact.matrix(), gate_up.matrix(), d.matrix(), 1, i, {4.0f, 1.702f});
      same("clamped");
      gelu_forward(ctx, gate_up.matrix(), act.matrix(), 1, i);
      same("gelu");
      gelu_backward(ctx, dact.matrix(), gate_up.matrix(), act.matrix(), 1, i);
      same("gelu's gradient");
    }
}
