#include "backends/cpu_gloo/kernels/gemm.h"

#include <cstdlib>
#include <string_view>

#include "backends/cpu_gloo/kernels/onednn.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

struct Size {
  std::int64_t T, N, K;
};
// Decode (skinny), its edge, odd sizes, and one that fills tiles; and none at all of each.
const Size kSizes[] = {{1, 37, 65},   {3, 16, 64}, {16, 65, 130}, {17, 65, 130}, {33, 7, 5}, {70, 129, 67},
                       {128, 64, 96}, {0, 8, 8},   {5, 0, 8},     {20, 9, 0},    {2, 3, 0}};

}  // namespace

TEST_CASE("linear forward, input gradient and weight gradient equal the definition") {
  KernelContext ctx(2);
  Random rng(1);
  for (DType in : kFloatTypes)
    for (DType out : kFloatTypes)
      for (Write write : {Write::overwrite, Write::accumulate})
        for (const auto& [T, N, K] : kSizes) {
          CAPTURE(name_of(in), name_of(out), T, N, K, write == Write::accumulate);
          const Tensor x = Tensor::random(in, T, K, K + 3, rng), w = Tensor::random(in, N, K, K + 5, rng);
          const Tensor dy = Tensor::random(in, T, N, N + 7, rng);
          const bool keep = write == Write::accumulate;
          const auto start = [&](std::int64_t rows, std::int64_t cols) {  // NaN proves that overwrite reads nothing
            return keep ? Tensor::random(out, rows, cols, cols + 2, rng)
                        : Tensor::filled(out, rows, cols, cols + 2, NAN);
          };
          const Tensor y0 = start(T, N), dx0 = start(T, K), dw0 = start(N, K);
          const auto old = [&](const Tensor& t) -> Dense { return keep ? dense(t) : Dense::Zero(t.rows(), t.cols()); };
          const Dense X = dense(x), W = dense(w), dY = dense(dy);
          Tensor y = y0, dx = dx0, dw = dw0;
          linear_forward(ctx, x.matrix(), w.matrix(), {}, y.matrix(), T, N, K, write);
          check_dense(y, old(y0) + X * W.transpose(), kF32Tolerance);
          linear_dgrad(ctx, dy.matrix(), w.matrix(), dx.matrix(), T, N, K, write);
          check_dense(dx, old(dx0) + dY * W, kF32Tolerance);
          linear_wgrad(ctx, dy.matrix(), x.matrix(), dw.matrix(), T, N, K, write);
          check_dense(dw, old(dw0) + dY.transpose() * X, kF32Tolerance);
        }
}

TEST_CASE("linear forward adds a bias of either dtype") {
  KernelContext ctx(2);
  Random rng(2);
  for (DType in : kFloatTypes)
    for (DType bias_type : kFloatTypes)
      for (std::int64_t T : {1, 5, 40})
        for (std::int64_t K : {0, 24}) {
          const std::int64_t N = 19;
          CAPTURE(name_of(in), name_of(bias_type), T, K);
          const Tensor x = Tensor::random(in, T, K, K + 1, rng), w = Tensor::random(in, N, K, K + 1, rng);
          const Tensor bias = Tensor::random(bias_type, 1, N, N, rng);
          Tensor y = Tensor::filled(in, T, N, N, NAN);
          linear_forward(ctx, x.matrix(), w.matrix(), bias.vector(), y.matrix(), T, N, K);
          check_dense(y, (dense(x) * dense(w).transpose()).rowwise() + dense(bias).row(0), kF32Tolerance);
        }
}

TEST_CASE("bias gradient is the column sum, in fp32, the same for every number of threads") {
  Random rng(3);
  for (DType in : kFloatTypes)
    for (std::int64_t T : {0, 1, 300}) {
      const std::int64_t N = 130;
      const Tensor dy = Tensor::random(in, T, N, N + 6, rng);
      const Tensor db0 = Tensor::random(DType::f32, 1, N, N, rng);
      Tensor one = db0, two = db0, fresh = Tensor::filled(DType::f32, 1, N, N, NAN);
      KernelContext c1(1), c2(2);
      bias_grad(c1, dy.matrix(), one.f32(), T, N, Write::accumulate);
      bias_grad(c2, dy.matrix(), two.f32(), T, N, Write::accumulate);
      bias_grad(c2, dy.matrix(), fresh.f32(), T, N, Write::overwrite);
      const Dense sum = dense(dy).colwise().sum();
      check_dense(one, dense(db0) + sum, kF32Tolerance);
      check_dense(fresh, sum, kF32Tolerance);
      CHECK(one.bytes() == two.bytes());
    }
}

TEST_CASE(
    "forward is row-invariant: a row alone, among others, beside any width, on 1 to 3 threads, has the same bits") {
  Random rng(4);
  const std::int64_t most_rows = 70, most_columns = 301;
  for (DType in : kFloatTypes)
    // Less than a vector, whole ones, rows that share sets of the cache, a ragged end, two chunks.
    for (std::int64_t K : {5, 64, 512, 517, 1100}) {
      const bool widened = in == DType::f32 || bf16_products() == Bf16Products::widened;
      const Tensor x = Tensor::random(in, most_rows, K, K, rng), w = Tensor::random(in, most_columns, K, K, rng);
      const Tensor bias = Tensor::random(DType::f32, 1, most_columns, most_columns, rng);
      const auto forward = [&](KernelContext& ctx, std::int64_t first, Tensor& y) {
        const ConstMatrix rows{x.bytes().data() + first * K * size_of(in), in, K};
        linear_forward(ctx, rows, w.matrix(), bias.vector(), y.matrix(), y.rows(), y.cols(), K);
      };
      KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
      std::vector<Tensor> alone;
      for (std::int64_t t = 0; t < most_rows; ++t)
        forward(threads[0], t, alone.emplace_back(DType::f32, 1, most_columns));
      for (std::int64_t T = 1; T <= (widened ? most_rows : kSkinnyRows); ++T)
        for (std::int64_t N : {std::int64_t{1}, std::int64_t{16}, std::int64_t{47}, most_columns})
          for (KernelContext& ctx : threads) {
            const std::int64_t first = (7 * T) % (most_rows - T + 1);
            CAPTURE(name_of(in), K, T, N, ctx.num_threads(), first);
            Tensor y = Tensor::filled(DType::f32, T, N, N, NAN);
            forward(ctx, first, y);
            std::int64_t differ = 0;
            for (std::int64_t t = 0; t < T; ++t)
              differ += std::memcmp(y.f32() + t * N, alone[static_cast<std::size_t>(first + t)].f32(),
                                    static_cast<std::size_t>(N) * sizeof(float)) != 0;
            CHECK(differ == 0);
          }
    }
}

TEST_CASE("so is it where many rows pass over blocks of weights, few rows of these over many, packed or not") {
  Random rng(6);
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  struct Shape {
    std::int64_t T, N, K;
  };
  // More weights than one thread makes strips of at once, with a ragged last strip; chunks behind the first; more rows
  // of x than a block's and than weight rows, which threads share then.
  for (const auto& [T, N, K] : {Shape{91, 2100, 512}, Shape{68, 1050, 1104}, Shape{331, 40, 2064}, Shape{400, 13, 64}})
    for (DType in : kFloatTypes) {
      if (in != DType::f32 && bf16_products() != Bf16Products::widened) continue;
      const Tensor x = Tensor::random(in, T, K, K + 3, rng), w = Tensor::random(in, N, K, K, rng);
      const Tensor y0 = Tensor::random(DType::f32, T, N, N, rng), bias = Tensor::random(DType::f32, 1, N, N, rng);
      Tensor packed = w;
      prepack(threads[0], packed.data(), in, N, K);
      Tensor alone = y0;
      for (std::int64_t t = 0; t < T; ++t)
        linear_forward(threads[0], {x.bytes().data() + t * (K + 3) * size_of(in), in, K + 3}, w.matrix(), bias.vector(),
                       {alone.f32() + t * N, DType::f32, N}, 1, N, K, Write::accumulate);
      for (KernelContext& ctx : threads)
        for (WeightOrder order : {WeightOrder::rows, WeightOrder::prepacked}) {
          CAPTURE(name_of(in), T, N, K, ctx.num_threads(), order == WeightOrder::prepacked);
          Tensor y = y0;
          linear_forward(ctx, x.matrix(), (order == WeightOrder::rows ? w : packed).matrix(), bias.vector(), y.matrix(),
                         T, N, K, Write::accumulate, order);
          CHECK(y.bytes() == alone.bytes());
        }
    }
}

TEST_CASE(
    "prepacked weights give what rows give, to the bit where results are row-invariant, and unpack is the reverse") {
  Random rng(5);
  KernelContext threads[] = {KernelContext(1), KernelContext(2), KernelContext(3)};
  int packed = 0;
  for (DType in : kFloatTypes)
    // Rows that are no panel, a panel and no block, blocks of 32 and of 64, fewer of them than threads and many, rows
    // behind the panels; columns that are no whole vector, no block of pairs, that end inside a step, two chunks.
    for (std::int64_t N : {3, 16, 64, 96, 128, 200, 301, 1024})
      for (std::int64_t K : {0, 5, 48, 64, 224, 1120}) {
        const Tensor w = Tensor::random(in, N, K, K, rng), bias = Tensor::random(DType::f32, 1, N, N, rng);
        Tensor p = w;
        prepack(threads[1], p.data(), in, N, K);
        CAPTURE(name_of(in), N, K, static_cast<int>(packed_order(in, N, K)));
        CHECK((p.bytes() == w.bytes()) == (packed_order(in, N, K) == PackedOrder::rows));
        packed += p.bytes() != w.bytes();
        Tensor again = p;
        unpack(threads[2], again.data(), in, N, K);
        CHECK(again.bytes() == w.bytes());
        const bool invariant = in == DType::f32 || bf16_products() == Bf16Products::widened;
        for (std::int64_t T : {0, 1, 2, 5, 6, 7, 12, 16, 17, 32, 33, 64, 65, 70, 130, 132})
          for (KernelContext& ctx : threads)
            for (Write write : {Write::overwrite, Write::accumulate}) {
              // oneDNN's kernel wants rows behind each other, as the plan has them; of others ours takes its place.
              const std::int64_t apart = T % 3 == 0 ? 3 : 0;
              const Tensor x = Tensor::random(in, T, K, K + apart, rng);
              const DType out = T % 2 == 0 ? in : DType::f32;
              const Tensor y0 = write == Write::accumulate ? Tensor::random(out, T, N, N + apart, rng)
                                                           : Tensor::filled(out, T, N, N + apart, NAN);
              Tensor of_rows = y0, of_packed = y0;
              CAPTURE(T, ctx.num_threads(), write == Write::accumulate);
              linear_forward(ctx, x.matrix(), w.matrix(), bias.vector(), of_rows.matrix(), T, N, K, write);
              linear_forward(ctx, x.matrix(), p.matrix(), bias.vector(), of_packed.matrix(), T, N, K, write,
                             WeightOrder::prepacked);
              if (invariant || T <= kSkinnyRows ||
                  (apart == 0 && bf16_products() == Bf16Products::avx512_bf16))  // the same kernel of oneDNN
                CHECK(of_packed.bytes() == of_rows.bytes());
              else
                check_dense(of_packed,
                            ((dense(x) * dense(w).transpose()).rowwise() + dense(bias).row(0)) +
                                (write == Write::accumulate ? dense(y0) : Dense::Zero(T, N)),
                            kF32Tolerance);
            }
      }
  CHECK(packed > 0);  // some order serves some shape on every machine
}

TEST_CASE("where weights lie in pairs, oneDNN has its own fast kernel for what plans multiply") {
  if (packed_order(DType::bf16, 64, 64) == PackedOrder::rows || bf16_products() == Bf16Products::widened) return;
  CHECK(rows_of_pairs(packed_order(DType::bf16, 128, 64)) == 64);
  CHECK(rows_of_pairs(packed_order(DType::bf16, 96, 64)) == 32);
  CHECK(packed_order(DType::bf16, 112, 64) == PackedOrder::rows);
  KernelContext ctx(2);
  for (const std::int64_t N : {64, 96, 2048})
    for (const std::int64_t T : {17, 40, 512})
      for (const DType out : kFloatTypes)
        for (const bool accumulate : {false, true})
          for (const bool bias : {false, true}) {
            CAPTURE(N, T, name_of(out), accumulate, bias);
            const std::int64_t K = 64;
            const std::vector<bf16> x(static_cast<std::size_t>(T * K)), w(static_cast<std::size_t>(N * K));
            const std::vector<float> b(static_cast<std::size_t>(N));
            std::vector<float> y(static_cast<std::size_t>(T * N));
            CHECK(try_matmul(ctx,
                             {.M = T,
                              .N = N,
                              .K = K,
                              .a_strides = {K, 1},
                              .ldc = N,
                              .in = DType::bf16,
                              .out = out,
                              .accumulate = accumulate,
                              .bias = bias,
                              .b_pairs = N % 64 == 0 ? 64 : 32},
                             x.data(), w.data(), bias ? b.data() : nullptr, y.data()));
          }
}

TEST_CASE("without the machine's bf16 units products of bf16 are widened") {
  const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");  // two of the suite's runs set it (CMakeLists.txt)
  CAPTURE(name_of(bf16_products()));
  if (most && (most == std::string_view("AVX2") || most == std::string_view("AVX512_CORE")))
    CHECK(bf16_products() == Bf16Products::widened);
  else if (dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_amx) CHECK(bf16_products() == Bf16Products::amx);
  else CHECK(bf16_products() != Bf16Products::amx);
}

TEST_CASE("bf16 without a bf16 oneDNN kernel: widened to fp32, same results to rounding") {
  KernelContext ctx(2);
  Random rng(5);
  const std::int64_t M = 21, N = 33, K = 45;
  for (DType out : kFloatTypes)
    for (bool accumulate : {false, true})
      for (bool transposed : {false, true}) {
        CAPTURE(name_of(out), accumulate, transposed);
        const Tensor a = Tensor::random(DType::bf16, transposed ? K : M, transposed ? M : K, 64, rng);
        const Tensor b = Tensor::random(DType::bf16, transposed ? N : K, transposed ? K : N, 70, rng);
        const Tensor c0 = Tensor::random(out, M, N, N + 4, rng);
        const Tensor bias = Tensor::random(DType::f32, 1, N, N, rng);
        Tensor c = c0;
        MatmulShape shape{.M = M,
                          .N = N,
                          .K = K,
                          .a_strides = {64, 1},
                          .b_strides = {70, 1},
                          .ldc = N + 4,
                          .in = DType::bf16,
                          .out = out,
                          .accumulate = accumulate,
                          .bias = true};
        if (transposed) shape.a_strides = {1, 64}, shape.b_strides = {1, 70};
        matmul_widened(ctx, shape, a.bytes().data(), b.bytes().data(), bias.f32(), c.data());
        Dense wanted;
        if (transposed) wanted = dense(a).transpose() * dense(b).transpose();
        else wanted = dense(a) * dense(b);
        wanted.rowwise() += dense(bias).row(0);
        if (accumulate) wanted += dense(c0);
        check_dense(c, wanted, kF32Tolerance);
      }
}
