// Matrix products by cuBLASLt, on its double: the numbers of our kernels, one search per shape, and what stays ours.
#include "backends/cuda/products.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "backends/cuda/fake/fake_blas.h"
#include "lowering/lower.h"
#include "tests/cuda_backend/device_bench.h"
#include "tests/cuda_backend/iteration.h"

using namespace hotbunk;
using namespace hotbunk::cuda;
using namespace hotbunk::test;

namespace products_test {
namespace {

/// A device with room for one product, and cuBLASLt's double.
struct Bench : cuda::test::DeviceBench {
  FakeBlasLt blas{fake};
};

/// Products of so few numbers are exact in fp32: sums differ by their order alone.
std::vector<float> numbers(std::int64_t n, std::uint64_t seed) { return cuda::test::bf16_numbers(n, seed, 2.0f); }

/// The same of magnitudes so far apart that every order of a sum rounds otherwise.
std::vector<float> scattered(std::int64_t n, std::uint64_t seed) {
  std::vector<float> v = numbers(n, seed);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = std::ldexp(v[i], -static_cast<int>(i * 7 % 13));
  return v;
}

}  // namespace

TEST_CASE("cuBLASLt's products are those of our kernels and of fp64, in every form and dtype") {
  for (const Product::Form form : {Product::Form::nt, Product::Form::nn, Product::Form::tn})
    for (const auto& [operands, result] :
         {std::pair{DType::f32, DType::f32}, std::pair{DType::bf16, DType::bf16}, std::pair{DType::bf16, DType::f32}})
      for (const bool accumulate : {false, true})
        for (const bool bias : {false, true}) {
          if (bias && (form != Product::Form::nt || accumulate || operands != result)) continue;
          Bench t;
          const std::int64_t m = 5, n = 24, k = 40;
          const Product p{form, operands, result, m, n, k, accumulate, bias};
          const CUdeviceptr base = t.memory.address();
          const ProductAddresses at{base, base + 65536, bias ? base + 131072 : 0, base + 196608};
          const auto a = numbers(m * k, 1), b = numbers(n * k, 2), c = numbers(n, 3), before = numbers(m * n, 4);
          t.write(at.a, a, operands), t.write(at.b, b, operands), t.write(at.c, before, result);
          if (bias) t.write(at.bias, c, operands);
          BlasProducts products(t.blas.table(), ProductPolicy::all, t.launch);
          REQUIRE(products.take(p, at, OpKind::linear));
          const auto theirs = t.read(at.c, static_cast<std::size_t>(m * n), result);
          t.write(at.c, before, result);
          const char* const name = form == Product::Form::nt ? "nt" : form == Product::Form::nn ? "nn" : "tn";
          const bool f32 = operands == DType::f32;
          t.launch(fmt::format("matmul_{}_{}_{}", name, kernel_dtype(operands), kernel_dtype(result)),
                   {blocks_of(n, 64), blocks_of(m, f32 ? 32 : 64)}, f32 ? 32 : 128, at.a,
                   static_cast<int>(form == Product::Form::tn ? m : k), at.b, at.bias, at.c, static_cast<int>(n),
                   static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), accumulate ? 1 : 0);
          const auto ours = t.read(at.c, static_cast<std::size_t>(m * n), result);
          INFO(fmt::format("{} {} -> {}, accumulate {}, bias {}", name, name_of(operands), name_of(result), accumulate,
                           bias));
          for (std::int64_t i = 0; i < m; ++i)
            for (std::int64_t j = 0; j < n; ++j) {
              double exact = accumulate ? before[static_cast<std::size_t>(i * n + j)] : 0.0;
              for (std::int64_t x = 0; x < k; ++x)
                exact += static_cast<double>(
                             a[static_cast<std::size_t>(form == Product::Form::tn ? x * m + i : i * k + x)]) *
                         b[static_cast<std::size_t>(form == Product::Form::nt ? j * k + x : x * n + j)];
              if (bias) exact += c[static_cast<std::size_t>(j)];
              // 40 products of at most 4, each exact: fp32 sums err by 40 roundings of 160 at most. A result in bf16
              // has 8 bits: half of the last one, and as much where two orders of the sum fall to two sides.
              const double tolerance = 40 * 160 * std::ldexp(1.0, -24) +
                                       (result == DType::bf16 ? std::abs(exact) * std::ldexp(1.0, -8) : 0.0);
              const auto at_ij = static_cast<std::size_t>(i * n + j);
              CHECK(std::abs(theirs[at_ij] - exact) <= tolerance);
              CHECK(std::abs(ours[at_ij] - exact) <= tolerance);
            }
          CHECK(t.fake.findings().empty());
        }
}

TEST_CASE("a shape is searched for once, worse aligned addresses are another, and what is not asked for stays ours") {
  Bench t;
  const CUdeviceptr base = t.memory.address();
  t.launch.fill(base, 0, t.memory.bytes());
  const Product p{Product::Form::nn, DType::bf16, DType::bf16, 4, 8, 8, false, false};
  const auto at = [&](CUdeviceptr skip) { return ProductAddresses{base, base + 4096, 0, base + 8192 + skip}; };
  BlasProducts products(t.blas.table(), ProductPolicy::backward, t.launch);
  CHECK_FALSE(products.take(p, at(0), OpKind::linear));  // forward
  CHECK(products.take(p, at(0), OpKind::linear_wgrad));
  CHECK(products.take(p, at(0), OpKind::linear_wgrad));
  CHECK(products.counts().searched == 1);
  CHECK(products.take(p, at(16), OpKind::linear_wgrad));  // the double refuses what is aligned worse than it was told
  CHECK(products.counts().searched == 2);
  Product empty = p;
  empty.m = 0;
  CHECK_FALSE(products.take(empty, at(0), OpKind::linear_wgrad));
  CHECK(products.counts().taken == 3);
  t.blas.answer_search(blas::not_supported);
  Product other = p;
  other.m = 3;
  CHECK_FALSE(products.take(other, at(0), OpKind::linear_wgrad));  // no kernel: ours
  CHECK_FALSE(products.take(other, at(0), OpKind::linear_wgrad));
  CHECK(products.counts().searched == 3);
  // A kernel that is not supported is none either; any other status, of the search or of a kernel, is an error.
  BlasProducts later(t.blas.table(), ProductPolicy::backward, t.launch);
  t.blas.answer_search(0, blas::not_supported);
  CHECK_FALSE(later.take(p, at(0), OpKind::linear_wgrad));
  constexpr BlasStatus invalid_value = 7;
  for (const auto& [search, kernel] : {std::pair{invalid_value, 0}, std::pair{0, invalid_value}}) {
    t.blas.answer_search(search, kernel);
    other.m += 2;  // a shape of its own
    CHECK_THROWS_WITH(later.take(other, at(0), OpKind::linear_wgrad),
                      Catch::Contains(fmt::format("cublasLtMatmulAlgoGetHeuristic of {} x 8 x 8: ", other.m)) &&
                          Catch::Contains("CUBLAS_STATUS_INVALID_VALUE"));
  }
  HB_CUDA(t.context.driver(), cuStreamSynchronize(t.stream.handle()));
  CHECK(t.fake.findings().empty());
}

TEST_CASE("a forward product is cuBLASLt's where it has our kernels' bits, which is asked once a shape") {
  for (const DType result : {DType::bf16, DType::f32})
    for (const bool as_ours : {false, true}) {
      Bench t;
      if (as_ours) t.blas.sum_as_ours();
      const std::int64_t m = 300, n = 256, k = 512;
      const CUdeviceptr base = t.memory.address();
      const ProductAddresses at{base, base + 393216, 0, base + 786432};
      t.write(at.a, scattered(m * k, 1), DType::bf16), t.write(at.b, scattered(n * k, 2), DType::bf16);
      std::int64_t asked = 0;
      BlasProducts products(t.blas.table(), ProductPolicy::equal, t.launch, [&](CUdeviceptr from, std::int64_t bytes) {
        ++asked;
        std::byte* here = t.staging.take(bytes);
        HB_CUDA(t.context.driver(), cuMemcpyDtoHAsync(here, from, static_cast<std::size_t>(bytes), t.stream.handle()));
        HB_CUDA(t.context.driver(), cuStreamSynchronize(t.stream.handle()));
        return here;
      });
      const auto own = [&](CUdeviceptr a, CUdeviceptr c, std::int64_t rows) {
        t.launch(fmt::format("matmul_nt_bf16_{}_64x64", kernel_dtype(result)), {blocks_of(rows, 64) * blocks_of(n, 64)},
                 128, a, static_cast<int>(k), at.b, CUdeviceptr{0}, c, static_cast<int>(n), static_cast<int>(rows),
                 static_cast<int>(n), static_cast<int>(k), 0);
      };
      const Product p{Product::Form::nt, DType::bf16, result, m, n, k, false, false};
      // Of zeros nothing can be said: ours, and asked again.
      Product zeros = p;
      zeros.n = n + 8;
      t.launch.fill(base + 1179648, 0, 2 * zeros.n * k);
      const ProductAddresses of_zeros{at.a, base + 1179648, 0, at.c};
      const auto own_zeros = [&](CUdeviceptr, CUdeviceptr c, std::int64_t rows) {
        t.launch.fill(c, 0, rows * zeros.n * size_of(result));
      };
      CHECK_FALSE(products.take(zeros, of_zeros, OpKind::linear, own_zeros));
      CHECK_FALSE(products.take(zeros, of_zeros, OpKind::linear, own_zeros));
      CHECK(products.counts().compared == 2);
      asked = 0;
      CHECK(products.take(p, at, OpKind::linear, own) == as_ours);
      CHECK(products.take(p, at, OpKind::linear, own) == as_ours);
      CHECK(asked == 1);
      CHECK(products.counts().compared == 3);
      CHECK(products.counts().taken == (as_ours ? 2 : 0));
      CHECK(products.counts().declined == (as_ours ? 2 : 4));
      Product few = p;
      few.m = 255;
      CHECK_FALSE(products.take(few, at, OpKind::linear, own));
      CHECK(products.counts().compared == 3);
      if (as_ours) {
        const auto theirs = t.read(at.c, static_cast<std::size_t>(m * n), result);
        own(at.a, at.c, m);
        CHECK(t.read(at.c, static_cast<std::size_t>(m * n), result) == theirs);
      }
      HB_CUDA(t.context.driver(), cuStreamSynchronize(t.stream.handle()));
      CHECK(t.fake.findings().empty());
    }
}

TEST_CASE("of many shapes no more are kept than there is room for") {
  Bench t;
  const CUdeviceptr base = t.memory.address();
  t.launch.fill(base, 0, t.memory.bytes());
  BlasProducts products(t.blas.table(), ProductPolicy::backward, t.launch);
  Product p{Product::Form::nn, DType::bf16, DType::bf16, 1, 1, 1, false, false};
  const ProductAddresses at{base, base + 524288, 0, base + 1048576};
  for (std::size_t i = 0; i < BlasProducts::most_chosen; ++i, ++p.m) products.take(p, at, OpKind::linear_wgrad);
  p.m = 1;
  products.take(p, at, OpKind::linear_wgrad);  // is still there
  CHECK(products.counts().searched == static_cast<std::int64_t>(BlasProducts::most_chosen));
  p.m = static_cast<std::int64_t>(BlasProducts::most_chosen) + 1;
  products.take(p, at, OpKind::linear_wgrad);
  p.m = 1;
  products.take(p, at, OpKind::linear_wgrad);  // is not
  CHECK(products.counts().searched == static_cast<std::int64_t>(BlasProducts::most_chosen) + 2);
  HB_CUDA(t.context.driver(), cuStreamSynchronize(t.stream.handle()));
  CHECK(t.fake.findings().empty());
}

TEST_CASE("a call of cuBLASLt's that fails ends the run with rank, phase and op") {
  const Scenario scenario = tiny_job();
  const auto plan = lower(scenario);
  REQUIRE(plan);
  Setting setting{.memory_bytes = std::int64_t{512} << 20, .products = ProductPolicy::backward};
  const Iteration whole = run_iteration(*plan, scenario, setting);
  REQUIRE_THAT(whole.text(), Catch::Equals(""));
  int entries = 0;
  for (const auto& [entry, calls] : whole.calls) {
    if (!entry.starts_with("cublasLt")) continue;
    ++entries;
    setting.prepare = [&, at = entry, nth = calls / 2 + 1](FakeDriver& f) {
      f.fail_call(at, nth, CUDA_ERROR_LAUNCH_FAILED);
    };
    const Iteration it = run_iteration(*plan, scenario, setting);
    INFO(entry << "\n" << it.text());
    CHECK(it.faults_met == 1);
    CHECK_THAT(it.text(), Catch::Contains(entry) && Catch::Contains("CUBLAS_STATUS_INTERNAL_ERROR"));
    if (entry != "cublasLtCreate")
      CHECK_THAT(it.text(), Catch::Contains("rank ") && Catch::Contains("phase train") && Catch::Contains("(op "));
  }
  CHECK(entries == 7);
}

TEST_CASE(
    "an iteration whose backward products are cuBLASLt's: log-probs stay equal to the bit, every schedule the same") {
  const Scenario scenario = tiny_job({"steps=2"});
  const auto plan = lower(scenario);
  REQUIRE(plan);
  const Iteration own = run_iteration(*plan, scenario);
  constexpr std::int64_t roomy = std::int64_t{512} << 20;  // workspaces of both ranks' streams
  const Setting backward{.memory_bytes = roomy, .products = ProductPolicy::backward};
  const Iteration first = run_iteration(*plan, scenario, backward);
  REQUIRE_THAT(first.text(), Catch::Equals(""));
  CHECK(first.calls.at("cublasLtMatmul") > 0);
  CHECK(first.calls.at("cuLaunchKernel") < own.calls.at("cuLaunchKernel"));
  CHECK(own.calls.count("cublasLtMatmul") == 0);
  for (std::uint64_t seed = 2; seed <= 6; ++seed) {
    Setting other = backward;
    other.seed = seed;
    CHECK(run_iteration(*plan, scenario, other).numbers == first.numbers);
  }
  // Forward ones have so few rows here that they stay ours.
  CHECK(run_iteration(*plan, scenario, {.memory_bytes = roomy, .products = ProductPolicy::equal}).numbers ==
        first.numbers);
  // Where they are compared however small, in graphs too, the run has the numbers that it has without.
  const Scenario halves = tiny_job({"steps=2", "train.precision.params=bf16", "rollout.dtype=bf16"});
  const auto in_halves = lower(halves);
  REQUIRE(in_halves);
  Setting equal{.memory_bytes = roomy, .products = ProductPolicy::backward, .blas_sums_as_ours = true};
  const Iteration without = run_iteration(*in_halves, halves, equal);
  REQUIRE_THAT(without.text(), Catch::Equals(""));
  equal.products = ProductPolicy::equal, equal.compared = {1, 1, 1};
  const Iteration with = run_iteration(*in_halves, halves, equal);
  REQUIRE_THAT(with.text(), Catch::Equals(""));
  CHECK(with.numbers == without.numbers);
  CHECK(with.calls.at("cublasLtMatmul") > without.calls.at("cublasLtMatmul"));
  equal.blas_sums_as_ours = false;  // other bits: forward products are ours
  Setting backward_alone = equal;
  backward_alone.products = ProductPolicy::backward;
  CHECK(run_iteration(*in_halves, halves, equal).numbers == run_iteration(*in_halves, halves, backward_alone).numbers);

  // All of them, those of decode's graphs too: no finding.
  const Iteration all = run_iteration(*plan, scenario, {.memory_bytes = roomy, .products = ProductPolicy::all});
  REQUIRE_THAT(all.text(), Catch::Equals(""));
  CHECK(all.calls.at("cublasLtMatmul") > first.calls.at("cublasLtMatmul"));
}

}  // namespace products_test
