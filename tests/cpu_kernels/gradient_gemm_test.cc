#include "backends/cpu_gloo/kernels/gradient_gemm.h"

#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

TEST_CASE("gradients by our kernel equal the definition, with the same bits on any number of threads") {
  Random rng(21);
  struct Size {
    std::int64_t M, N, K;
  };
  // Less than a tile; ragged tiles and strips; more rows, columns or depth than are held at a time; whole tiles.
  const Size sizes[] = {{1, 1, 1}, {5, 37, 300}, {367, 40, 523}, {13, 1553, 70}, {725, 17, 9}, {24, 64, 768}};
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  for (const auto& [M, N, K] : sizes)
    for (const DType in : kFloatTypes)
      for (const DType out : kFloatTypes)
        for (const bool accumulate : {false, true})
          for (const bool transposed : {false, true}) {
            CAPTURE(M, N, K, name_of(in), name_of(out), accumulate, transposed);
            const std::int64_t rows = transposed ? K : M, cols = transposed ? M : K;
            const Tensor a = Tensor::random(in, rows, cols, cols + 3, rng), b = Tensor::random(in, K, N, N + 5, rng);
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
            const Dense product = (transposed ? Dense(dense(a).transpose()) : dense(a)) * dense(b);
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

TEST_CASE("gradients by our kernel: where M is both strides' neighbour, one row or one column is the same product") {
  Random rng(22);
  KernelContext ctx(2);
  const std::int64_t N = 45, K = 300;
  const Tensor a = Tensor::random(DType::bf16, 1, K, K, rng), b = Tensor::random(DType::bf16, K, N, N, rng);
  std::vector<Tensor> out;
  for (const std::array<std::int64_t, 2> strides : {std::array<std::int64_t, 2>{K, 1}, {1, 1}}) {
    Tensor& c = out.emplace_back(DType::f32, 1, N);
    const MatmulShape shape{
        .M = 1, .N = N, .K = K, .a_strides = strides, .b_strides = {N, 1}, .ldc = N, .in = DType::bf16};
    gradient_gemm(ctx, shape, a.bytes().data(), b.bytes().data(), c.data());
  }
  CHECK(out[0].bytes() == out[1].bytes());
}
