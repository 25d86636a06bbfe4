#include "backends/cpu_gloo/kernels/fused_linear.h"

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/norm.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

constexpr std::int64_t kMostRows = 400;
constexpr float kNormEps = 1e-5f;

/// What stands beside a product.
struct Beside {
  bool norm = false, delta = false, gate = false, residual = false, bias = false, wide = false;  // wide: y is fp32
  float offset = 0.0f;
};
const Beside kBeside[] = {
    {},
    {.norm = true},
    {.norm = true, .delta = true, .offset = 1.0f},
    {.gate = true},
    {.residual = true},
    {.norm = true, .gate = true, .bias = true, .offset = 1.0f},
    {.norm = true, .delta = true, .gate = true},
    {.residual = true, .bias = true},
    {.norm = true, .delta = true, .residual = true},
    {.norm = true, .delta = true, .bias = true, .wide = true},
};

/// All operands for up to kMostRows rows of x. Rows may lie apart.
struct Layer {
  DType dtype;
  std::int64_t N, K;
  Tensor x, delta, w, packed, norm, bias, residual;
  Layer(DType t, std::int64_t n, std::int64_t k, std::int64_t apart, Random& rng)
      : dtype(t),
        N(n),
        K(k),
        x(Tensor::random(t, kMostRows, k, k + apart, rng)),
        delta(Tensor::random(t, kMostRows, k, k + 2 * apart, rng)),
        w(Tensor::random(t, n, k, k, rng)),
        packed(w),
        norm(Tensor::random(n % 3 == 0 ? DType::f32 : t, 1, k, k, rng)),
        bias(Tensor::random(n % 3 == 1 ? DType::f32 : t, 1, n, n, rng)),
        residual(Tensor::random(t, kMostRows, n, n + apart, rng)) {
    KernelContext ctx(1);
    prepack(ctx, packed.data(), t, n, k);
  }
  const Tensor& weights(WeightOrder order) const { return order == WeightOrder::rows ? w : packed; }
};

ConstMatrix from_row(const Tensor& t, std::int64_t first) {
  const ConstMatrix m = t.matrix();
  return {t.bytes().data() + first * m.ld * size_of(t.dtype()), m.dtype, m.ld};
}

/// Outputs, NaN before: what is not written is seen.
struct Results {
  Tensor y, sum;
  Results(const Layer& o, const Beside& beside, std::int64_t T)
      : y(Tensor::filled(beside.wide ? DType::f32 : o.dtype, T, beside.gate ? o.N / 2 : o.N, o.N + 3, NAN)),
        sum(Tensor::filled(o.dtype, T, o.K, o.K + 5, NAN)) {}
  bool operator==(const Results& other) const {
    return y.bytes() == other.y.bytes() && sum.bytes() == other.sum.bytes();
  }
};

Results fused(KernelContext& ctx, const Layer& o, const Beside& beside, std::int64_t first, std::int64_t T,
              WeightOrder order) {
  Results r(o, beside, T);
  BesideProduct with{.swiglu = beside.gate};
  if (beside.norm) with.norm = o.norm.vector(), with.eps = kNormEps, with.offset = beside.offset;
  if (beside.delta) with.delta = from_row(o.delta, first), with.sum = r.sum.matrix();
  if (beside.residual) with.residual = from_row(o.residual, first);
  fused_linear_forward(ctx, from_row(o.x, first), o.weights(order).matrix(),
                       beside.bias ? o.bias.vector() : ConstVector{}, with, r.y.matrix(), T, o.N, o.K, order);
  return r;
}

/// The same by the kernels that it is made of, one after the other.
Results one_by_one(KernelContext& ctx, const Layer& o, const Beside& beside, std::int64_t T, WeightOrder order) {
  Results r(o, beside, T);
  ConstMatrix x = o.x.matrix();
  Tensor normed = Tensor::filled(o.dtype, T, o.K, o.K, NAN), product = Tensor::filled(o.dtype, T, o.N, o.N, NAN);
  std::vector<float> rstd(static_cast<std::size_t>(T));
  if (beside.delta)
    add_rmsnorm_forward(ctx, x, o.delta.matrix(), o.norm.vector(), r.sum.matrix(), normed.matrix(), rstd.data(), T, o.K,
                        kNormEps, beside.offset);
  else if (beside.norm)
    rmsnorm_forward(ctx, x, o.norm.vector(), normed.matrix(), rstd.data(), T, o.K, kNormEps, beside.offset);
  if (beside.norm) x = normed.matrix();
  linear_forward(ctx, x, o.weights(order).matrix(), beside.bias ? o.bias.vector() : ConstVector{},
                 beside.gate ? product.matrix() : r.y.matrix(), T, o.N, o.K, Write::overwrite, order);
  if (beside.gate) swiglu_forward(ctx, product.matrix(), r.y.matrix(), T, o.N / 2);
  if (beside.residual) add(ctx, r.y.matrix(), o.residual.matrix(), T, o.N);
  return r;
}

}  // namespace

TEST_CASE("a product and what stands beside it have the bits of the kernels one after the other") {
  Random rng(1);
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  // Halves that are no panel, one panel, one and a half blocks of 32 and of 64, whole blocks, rows behind the panels,
  // an odd number of columns; of x's columns none, no vector, no block of pairs, a ragged end, two chunks. Gates so
  // wide that they are computed beside the product of 11 rows of x, and of one, with halves that end inside a panel and
  // inside blocks of 32 and of 64.
  const std::int64_t shapes[][2] = {{0, 64},    {2, 5},     {32, 48},    {48, 64},   {96, 64},   {160, 96},
                                    {128, 64},  {200, 0},   {200, 48},   {256, 224}, {301, 517}, {192, 1120},
                                    {1072, 64}, {1056, 64}, {1088, 100}, {1088, 64}, {11072, 32}};
  for (DType dtype : kFloatTypes)
    for (const auto& [N, K] : shapes)
      for (std::int64_t apart : {0, 3}) {
        const Layer o(dtype, N, K, apart, rng);
        for (std::int64_t T : {0, 1, 2, 3, 8, 16, 17, 32, 33, 64, 70, 400}) {
          if (T * N > 100'000) continue;                  // seconds
          if (T == 400 && N != 160 && N != 200) continue;  // threads share rows of x, and gates beside them
          for (const Beside& beside : kBeside)
            for (WeightOrder order : {WeightOrder::rows, WeightOrder::prepacked})
              for (KernelContext& ctx : threads) {
                if (beside.gate && N % 2 != 0) continue;
                CAPTURE(name_of(dtype), N, K, apart, T, order == WeightOrder::prepacked, ctx.num_threads());
                CAPTURE(beside.norm, beside.delta, beside.gate, beside.residual, beside.bias, beside.offset);
                CHECK(fused(ctx, o, beside, 0, T, order) == one_by_one(ctx, o, beside, T, order));
              }
        }
      }
}

TEST_CASE("so do they whoever multiplies bf16: packed for a unit and multiplied by ours, or the other way round") {
  Random rng(3);
  std::vector<ProductPaths> choices;
  for (const ProductPath all : {ProductPath::own, ProductPath::wide}) choices.push_back({{all, all, all, all}});
  for (const ProductClass c : kProductClasses) {
    choices.push_back(rule_of_machine());
    choices.back()[c] = ProductPath::own;
  }
  const std::int64_t shapes[][2] = {{96, 64}, {128, 64}, {301, 517}, {1088, 100}};
  for (const auto& [N, K] : shapes)
    for (const ProductPaths& paths : choices) {
      KernelContext threads[] = {KernelContext(1, paths), KernelContext(3, paths)};
      Layer o(DType::bf16, N, K, 3, rng);
      o.packed = o.w;
      prepack(threads[0], o.packed.data(), o.dtype, N, K);
      for (std::int64_t T : {1, 17, 64, 70, 130})
        for (const Beside& beside : kBeside)
          for (WeightOrder order : {WeightOrder::rows, WeightOrder::prepacked})
            for (KernelContext& ctx : threads) {
              if (beside.gate && N % 2 != 0) continue;
              CAPTURE(text_of(paths, bf16_unit()), N, K, T, order == WeightOrder::prepacked, ctx.num_threads());
              CAPTURE(beside.norm, beside.delta, beside.gate, beside.residual, beside.bias, beside.offset);
              CHECK(fused(ctx, o, beside, 0, T, order) == one_by_one(ctx, o, beside, T, order));
            }
    }
}

TEST_CASE("a row has the same bits alone and among others where linear forward is row-invariant") {
  Random rng(2);
  constexpr std::int64_t kRows = 70;
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  const std::int64_t shapes[][2] = {{96, 517}, {192, 1120}, {1088, 32}};
  for (DType dtype : kFloatTypes)
    for (const auto& [N, K] : shapes) {
      const Layer o(dtype, N, K, 0, rng);
      const bool invariant = dtype == DType::f32 || bf16_products() == Bf16Products::widened;
      for (const Beside& beside : kBeside)
        for (WeightOrder order : {WeightOrder::rows, WeightOrder::prepacked}) {
          std::vector<Results> alone;
          for (std::int64_t t = 0; t < kRows; ++t) alone.push_back(fused(threads[0], o, beside, t, 1, order));
          for (std::int64_t T : {2, 5, 7, 13, 16, 17, 40, 64, 70})
            for (KernelContext& ctx : threads) {
              if (!invariant && T > kSkinnyRows) continue;
              const std::int64_t first = (7 * T) % (kRows - T + 1);
              CAPTURE(name_of(dtype), N, K, T, order == WeightOrder::prepacked, ctx.num_threads(), first);
              CAPTURE(beside.norm, beside.delta, beside.gate, beside.residual, beside.bias);
              const Results all = fused(ctx, o, beside, first, T, order);
              std::int64_t differ = 0;
              const auto compare = [&](const Tensor& one, const Tensor& many, std::int64_t t) {
                const auto bytes = static_cast<std::size_t>(one.cols() * size_of(one.dtype()));
                differ += std::memcmp(from_row(one, 0).data, from_row(many, t).data, bytes) != 0;
              };
              for (std::int64_t t = 0; t < T; ++t) {
                const Results& one = alone[static_cast<std::size_t>(first + t)];
                compare(one.y, all.y, t), compare(one.sum, all.sum, t);
              }
              CHECK(differ == 0);
            }
        }
    }
}
