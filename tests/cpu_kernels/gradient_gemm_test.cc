#include "backends/cpu_gloo/kernels/gradient_gemm.h"

#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

/// What lies behind the rows' ends is NaN: who reads it into a sum is found.
Tensor random_before_nan(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld, Random& rng) {
  Tensor t = Tensor::filled(dtype, rows, ld, ld, NAN);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) t.set(r, c, rng.normal());
  return t;
}
Dense columns(const Tensor& t, std::int64_t n) { return dense(t).leftCols(n); }

}  // namespace

TEST_CASE("gradients by our kernel equal the definition, with the same bits on any number of threads") {
  Random rng(21);
  struct Size {
    std::int64_t M, N, K;
  };
  // Less than a tile; ragged tiles and strips; more rows, columns or depth than are held at a time; whole tiles.
  const Size sizes[] = {{1, 1, 1},       {5, 700, 900}, {367, 40, 523}, {13, 1553, 70},
                        {1500, 20, 300}, {24, 64, 768}, {0, 8, 8},      {8, 0, 8}};
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  for (const auto& [M, N, K] : sizes)
    for (const DType in : kFloatTypes)
      for (const DType out : kFloatTypes)
        for (const bool accumulate : {false, true})
          for (const bool transposed : {false, true}) {
            CAPTURE(M, N, K, name_of(in), name_of(out), accumulate, transposed);
            const std::int64_t rows = transposed ? K : M, cols = transposed ? M : K;
            const Tensor a = random_before_nan(in, rows, cols, cols + 3, rng),
                         b = random_before_nan(in, K, N, N + 5, rng);
            const Tensor start = accumulate ? Tensor::random(out, M, N, N + 2, rng)  // NaN: overwrites, reads nothing
                                            : Tensor::filled(out, M, N, N + 2, NAN);
            const std::array<std::int64_t, 2> strides =
                transposed ? std::array<std::int64_t, 2>{1, cols + 3} : std::array<std::int64_t, 2>{cols + 3, 1};
            const MatmulShape shape{.M = M,
                                    .N = N,
                                    .K = K,
                                    .a_strides = strides,
                                    .b_strides = {N + 5, 1},
                                    .ldc = N + 2,
                                    .in = in,
                                    .out = out,
                                    .accumulate = accumulate};
            const Dense left = columns(a, cols);
            const Dense product = (transposed ? Dense(left.transpose()) : left) * columns(b, N);
            const Dense wanted = accumulate ? Dense(dense(start) + product) : product;
            Tensor one = start;
            gradient_gemm(threads[0], shape, a.bytes().data(), b.bytes().data(), one.data());
            check_dense(one, wanted, kF32Tolerance);
            for (KernelContext& ctx : threads) {
              Tensor c = start;
              gradient_gemm(ctx, shape, a.bytes().data(), b.bytes().data(), c.data());
              CHECK(c.bytes() == one.bytes());
            }
          }
}

TEST_CASE("gradients by our kernel: rows of a and columns of its transpose make the same bits") {
  Random rng(22);
  KernelContext ctx(2);
  const std::int64_t M = 100, N = 45, K = 300;
  const Tensor a = Tensor::random(DType::bf16, M, K, K, rng), b = Tensor::random(DType::bf16, K, N, N, rng);
  Tensor transposed(DType::bf16, K, M);
  for (std::int64_t m = 0; m < M; ++m)
    for (std::int64_t k = 0; k < K; ++k) transposed.set(k, m, a.at(m, k));
  const auto product = [&](const Tensor& left, std::array<std::int64_t, 2> strides) {
    Tensor c(DType::f32, M, N);
    const MatmulShape shape{
        .M = M, .N = N, .K = K, .a_strides = strides, .b_strides = {N, 1}, .ldc = N, .in = DType::bf16};
    gradient_gemm(ctx, shape, left.bytes().data(), b.bytes().data(), c.data());
    return c;
  };
  CHECK(product(a, {K, 1}).bytes() == product(transposed, {1, M}).bytes());
}
