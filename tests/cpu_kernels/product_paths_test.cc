// Which path multiplies bf16: what is chosen of rates, how a choice is written down, and that products take it.
#include "backends/cpu_gloo/kernels/product_paths.h"

#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <oneapi/dnnl/dnnl.hpp>
#include <set>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/gradient_gemm.h"
#include "backends/cpu_gloo/kernels/onednn.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "backends/cpu_gloo/kernels/row_gemm.h"
#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

using enum ProductPath;
using enum ProductClass;

constexpr Bf16Products kUnits[] = {Bf16Products::amx, Bf16Products::avx512_bf16, Bf16Products::widened};

/// Every choice that a machine of this unit has.
std::vector<ProductPaths> all_paths(Bf16Products unit) {
  std::vector<ProductPaths> out;
  for (const ProductPath few : candidates(few_rows, unit))
    for (const ProductPath some : candidates(some_rows, unit))
      for (const ProductPath many : candidates(many_rows, unit))
        for (const ProductPath gradient : candidates(gradients, unit)) out.push_back({{few, some, many, gradient}});
  return out;
}

Tensor random_bf16(std::int64_t rows, std::int64_t cols, Random& rng) {
  return Tensor::random(DType::bf16, rows, cols, cols, rng);
}

/// What a path makes of a class's product that reads rows, without asking anybody which path it is.
void multiply(KernelContext& ctx, ProductClass of, ProductPath path, const MatmulShape& shape, const Tensor& a,
              const Tensor& b, Tensor& c) {
  switch (path) {
    case own:
      if (of == gradients) return gradient_gemm(ctx, shape, a.bytes().data(), b.bytes().data(), c.data());
      return row_gemm(ctx, a.matrix(), b.matrix(), nullptr, c.matrix(), shape.M, shape.N, shape.K, Write::overwrite);
    case unit:
      return (void)try_matmul(ctx, shape, a.bytes().data(), b.bytes().data(), nullptr, c.data());
    case wide:
      return matmul_widened(ctx, shape, a.bytes().data(), b.bytes().data(), nullptr, c.data());
  }
}

}  // namespace

TEST_CASE("a path other than the rule's is taken where it is so much faster, class by class") {
  const ProductPaths rule = rule_of(Bf16Products::avx512_bf16);
  REQUIRE(rule == ProductPaths{{own, unit, unit, unit}});
  const auto chosen = [&](std::vector<PathRate> few, std::vector<PathRate> some, std::vector<PathRate> many,
                          std::vector<PathRate> gradient) {
    return choose(rule, {{std::move(few), std::move(some), std::move(many), std::move(gradient)}});
  };
  CHECK(chosen({}, {}, {}, {}) == rule);
  // 100 × 1.25 = 125: one below is noise, as much is not.
  CHECK(chosen({{own, 100}, {unit, 124.9}}, {{own, 124.9}, {unit, 100}, {wide, 50}}, {}, {}) == rule);
  CHECK(chosen({{own, 100}, {unit, 125}}, {}, {}, {}) == ProductPaths{{unit, unit, unit, unit}});
  CHECK(chosen({}, {{own, 125}, {unit, 100}, {wide, 90}}, {}, {}) == ProductPaths{{own, own, unit, unit}});
  CHECK(chosen({}, {}, {{own, 130}, {unit, 100}, {wide, 140}}, {}) == ProductPaths{{own, unit, wide, unit}});
  CHECK(chosen({}, {}, {{own, 124.9}, {unit, 100}}, {{unit, 100}, {wide, 104.9}}) == rule);  // of gradients 105
  CHECK(chosen({}, {}, {}, {{unit, 100}, {wide, 105.1}}) == ProductPaths{{own, unit, unit, wide}});
  CHECK(chosen({}, {}, {}, {{unit, 100}, {wide, 200}}) == ProductPaths{{own, unit, unit, wide}});
  CHECK(chosen({{own, 1}, {unit, 9}}, {{own, 3}, {unit, 1}, {wide, 2}}, {{own, 1}, {unit, 1}, {wide, 2}},
               {{unit, 1}, {wide, 2}}) == ProductPaths{{unit, own, wide, wide}});
  // The rule of other machines is where the comparison starts there.
  const ProductPaths widened = rule_of(Bf16Products::widened);
  REQUIRE(widened == ProductPaths{{own, own, own, own}});
  ProductRates rates;
  rates[some_rows] = {{own, 100}, {wide, 120}};
  rates[many_rows] = {{own, 100}, {wide, 126}};
  rates[gradients] = {{wide, 7}};  // without the rule's own rate
  CHECK(choose(widened, rates) == ProductPaths{{own, own, wide, own}});
  rates[gradients] = {{own, 7}, {wide, 9}};
  CHECK(choose(widened, rates) == ProductPaths{{own, own, wide, wide}});
}

TEST_CASE("a choice hangs by little where another path is near what it takes to leave the rule, on either side") {
  const auto hangs = [](ProductClass c, double other) { return hangs_by_little(c, {{own, 100}, {wide, other}}, own); };
  CHECK((hangs(gradients, 96) && hangs(gradients, 100) && hangs(gradients, 115)));  // around 105
  CHECK_FALSE((hangs(gradients, 94) || hangs(gradients, 116)));
  CHECK((hangs(many_rows, 114) && hangs(many_rows, 137)));  // around 125
  CHECK_FALSE((hangs(many_rows, 100) || hangs(many_rows, 138)));
  // The fastest of the others counts, and the rule's own rate is no other's.
  CHECK_FALSE(hangs_by_little(gradients, {{own, 100}, {unit, 200}, {wide, 104}}, own));
  CHECK(hangs_by_little(gradients, {{wide, 50}, {unit, 100}, {own, 102}}, unit));
  CHECK_FALSE((hangs_by_little(gradients, {{wide, 105}}, own) || hangs_by_little(gradients, {{own, 105}}, own)));
  CHECK_FALSE(hangs_by_little(gradients, {}, own));
}

TEST_CASE("oneDNN in fp32 is not taken of some rows where weights are packed in pairs for the unit") {
  const ProductPaths widened = rule_of(Bf16Products::widened);
  ProductRates rates;
  rates[some_rows] = {{own, 100}, {unit, 130}, {wide, 200}};
  CHECK(choose(widened, rates) == ProductPaths{{own, wide, own, own}});
  rates[many_rows] = {{own, 100}, {unit, 200}, {wide, 100}};
  CHECK(choose(widened, rates) == ProductPaths{{own, unit, unit, own}});
  rates[some_rows] = {{own, 100}, {unit, 120}, {wide, 200}};
  CHECK(choose(widened, rates) == ProductPaths{{own, own, unit, own}});
  rates[many_rows] = {};
  rates[few_rows] = {{own, 100}, {unit, 125}};
  CHECK(choose(widened, rates) == ProductPaths{{unit, own, own, own}});
  // So it is not measured where the rule packs for the unit.
  for (const Bf16Products machine : kUnits)
    for (const ProductClass c : kProductClasses) {
      CAPTURE(name_of(machine), name_of(c));
      CHECK(measured_candidates(c, machine, widened) == candidates(c, machine));
      auto all = candidates(c, machine);
      if (c == some_rows) std::erase(all, wide);
      if (machine != Bf16Products::widened) CHECK(measured_candidates(c, machine, rule_of(machine)) == all);
    }
}

TEST_CASE("a clock too coarse for what is measured tells nothing apart: the rule stays") {
  const auto rates = [](std::vector<double> seconds) { return rates_of({own, unit}, seconds, 4e6, 1e-4); };
  const auto good = rates({1e-3, 1e-4});
  REQUIRE(good.size() == 2);
  CHECK(good[0].path == own);
  CHECK(good[0].gflop_s == Approx(4));
  CHECK(good[1].path == unit);
  CHECK(good[1].gflop_s == Approx(40));
  CHECK(rates({1e-3, 0.0}).empty());  // ticks of 10 ms
  CHECK(rates({0.0, 0.0}).empty());
  CHECK(rates({9e-5, 1e-3}).empty());
  CHECK(rates_of({own, unit}, {0.0, 1e-3}, 4e6, 0.0).empty());
}

TEST_CASE("the unit is a matter of features, not of the order in which oneDNN numbers instruction sets") {
  const auto of = [](dnnl::cpu_isa isa) { return unit_of_isa(static_cast<unsigned>(isa)); };
  using enum dnnl::cpu_isa;
  CHECK(of(avx512_core_amx) == Bf16Products::amx);
  CHECK(of(avx512_core_bf16) == Bf16Products::avx512_bf16);
  for (const dnnl::cpu_isa none : {all, sse41, avx2, avx2_vnni, avx512_core, avx512_core_vnni})
    CHECK(of(none) == Bf16Products::widened);
  // What a later oneDNN puts between the two, or behind them, has all that they have.
  const auto bf16 = static_cast<unsigned>(avx512_core_bf16), amx = static_cast<unsigned>(avx512_core_amx);
  CHECK(unit_of_isa(bf16 | 0x1000) == Bf16Products::avx512_bf16);
  CHECK(unit_of_isa(amx | 0x1000) == Bf16Products::amx);
}

TEST_CASE("what a machine has no unit for is no candidate, and every rule is one") {
  for (const Bf16Products machine : kUnits)
    for (const ProductClass c : kProductClasses) {
      const auto paths = candidates(c, machine);
      CAPTURE(name_of(machine), name_of(c));
      CHECK((std::ranges::count(paths, unit) == 1) == (machine != Bf16Products::widened));
      CHECK(std::ranges::count(paths, rule_of(machine)[c]) == 1);
      CHECK(std::ranges::count(paths, rule_of(Bf16Products::widened)[c]) == 1);  // the rule of Intel's AVX512_BF16
    }
  CHECK((bf16_products() == bf16_unit() || bf16_products() == Bf16Products::widened));
}

TEST_CASE("a choice is a text and back; one machine's is another's where that can do it") {
  CHECK(text_of(rule_of(Bf16Products::amx), Bf16Products::amx) == "AMX tiles");
  CHECK(text_of(rule_of(Bf16Products::avx512_bf16), Bf16Products::avx512_bf16) == "AVX512_BF16");
  for (const Bf16Products machine : kUnits)
    CHECK(text_of(rule_of(Bf16Products::widened), machine) == "widened to fp32");
  CHECK(text_of({{own, unit, own, wide}}, Bf16Products::avx512_bf16) ==
        "AVX512_BF16; many rows: own kernels; gradients: oneDNN in fp32");
  CHECK(text_of({{unit, unit, unit, unit}}, Bf16Products::amx) == "AMX tiles; few rows: AMX tiles");
  CHECK(text_of({{own, wide, own, wide}}, Bf16Products::amx) ==
        "widened to fp32; some rows: oneDNN in fp32; gradients: oneDNN in fp32");
  for (const Bf16Products machine : kUnits) {
    std::set<std::string> texts;
    for (const ProductPaths& paths : all_paths(machine)) {
      const std::string text = text_of(paths, machine);
      CAPTURE(text);
      CHECK(texts.insert(text).second);
      CHECK(paths_of(text, machine) == paths);
      const bool takes_unit = std::ranges::count(paths.by_class, unit) > 0;
      for (const Bf16Products other : kUnits)
        if (other != machine) CHECK(paths_of(text, other).has_value() == !takes_unit);
    }
    CHECK(texts.size() == (machine == Bf16Products::widened ? 2 * 2 * 2 : 2 * 3 * 3 * 3));
    for (const char* none : {"", "rule", "AVX512_BF16 ", "widened to fp32;", "widened to fp32; gradients: own kernels",
                             "widened to fp32; many rows: AMX"})
      CHECK_FALSE(paths_of(none, machine));
  }
}

TEST_CASE("products of a class take its path, and no other class's") {
  Random rng(11);
  const Bf16Products machine = bf16_unit();
  // Behind one row, the last of few, the first and the last of some, and of many.
  struct Rows {
    std::int64_t T;
    ProductClass is;
  };
  const Rows all_rows[] = {{1, few_rows},   {kSkinnyRows, few_rows}, {kSkinnyRows + 1, some_rows},
                           {40, some_rows}, {kSomeRows, some_rows},  {kSomeRows + 1, many_rows},
                           {300, many_rows}};
  // Of 320 columns oneDNN sums 160 at a time with AVX2 and all with AVX-512, our kernel 256 or 192.
  const std::int64_t N = 320, K = 1056;
  for (const Rows& rows : all_rows) {
    const std::int64_t T = rows.T;
    const ProductClass is = rows.is;
    REQUIRE(class_of_rows(T) == is);
    const Tensor x = random_bf16(T, K, rng), w = random_bf16(N, K, rng), dy = random_bf16(T, N, rng);
    const MatmulShape forward{
        .M = T, .N = N, .K = K, .a_strides = {K, 1}, .b_strides = {1, K}, .ldc = N, .in = DType::bf16},
        dgrad{.M = T, .N = K, .K = N, .a_strides = {N, 1}, .b_strides = {K, 1}, .ldc = K, .in = DType::bf16},
        wgrad{.M = N, .N = K, .K = T, .a_strides = {1, N}, .b_strides = {K, 1}, .ldc = K, .in = DType::bf16};
    KernelContext plain(2);
    const auto check = [&](ProductClass c, const MatmulShape& shape, const Tensor& a, const Tensor& b, auto&& product) {
      const auto paths = candidates(c, machine);
      std::set<std::string> bits;
      for (const ProductPath path : paths) {
        Tensor expected(DType::f32, shape.M, shape.N);
        multiply(plain, c, path, shape, a, b, expected);
        bits.insert(std::string(reinterpret_cast<const char*>(expected.bytes().data()), expected.bytes().size()));
        for (const ProductPath elsewhere : {own, wide}) {
          ProductPaths chosen;
          chosen.by_class.fill(elsewhere);
          chosen[c] = path;
          KernelContext ctx(2, chosen);
          Tensor y = Tensor::filled(DType::f32, shape.M, shape.N, shape.N, NAN);
          product(ctx, y.matrix());
          CAPTURE(T, name_of(c), static_cast<int>(path), static_cast<int>(elsewhere));
          CHECK(y.bytes() == expected.bytes());
        }
      }
      // Or nothing was told apart: short gradients have the same bits by our kernel and by oneDNN in fp32.
      const bool alike = c == gradients && shape.K < 300;
      if (c != gradients || T > 2) CHECK(bits.size() >= paths.size() - (alike ? 1 : 0));
    };
    check(is, forward, x, w,
          [&](KernelContext& ctx, Matrix y) { linear_forward(ctx, x.matrix(), w.matrix(), {}, y, T, N, K); });
    check(gradients, dgrad, dy, w, [&](KernelContext& ctx, Matrix dx) {
      linear_dgrad(ctx, dy.matrix(), w.matrix(), dx, T, N, K, Write::overwrite);
    });
    check(gradients, wgrad, dy, x, [&](KernelContext& ctx, Matrix dw) {
      linear_wgrad(ctx, dy.matrix(), x.matrix(), dw, T, N, K, Write::overwrite);
    });
  }
}

TEST_CASE("fp32 has one path, whatever is chosen for bf16") {
  Random rng(12);
  const std::int64_t T = 40, N = 64, K = 96;
  const Tensor x = Tensor::random(DType::f32, T, K, K, rng), w = Tensor::random(DType::f32, N, K, K, rng);
  const auto all = [&](const ProductPaths& paths) {
    KernelContext ctx(2, paths);
    Tensor y(DType::f32, T, N), dx(DType::f32, T, K), dw(DType::f32, N, K);
    linear_forward(ctx, x.matrix(), w.matrix(), {}, y.matrix(), T, N, K);
    linear_dgrad(ctx, y.matrix(), w.matrix(), dx.matrix(), T, N, K, Write::overwrite);
    linear_wgrad(ctx, y.matrix(), x.matrix(), dw.matrix(), T, N, K, Write::overwrite);
    Tensor packed = w;
    prepack(ctx, packed.data(), DType::f32, N, K);
    return std::vector{y.bytes(), dx.bytes(), dw.bytes(), packed.bytes()};
  };
  const auto of_rule = all(rule_of_machine());
  for (const ProductPaths& paths : all_paths(bf16_unit())) CHECK(all(paths) == of_rule);
}

TEST_CASE("weights lie in pairs where the machine's unit multiplies, in rows for oneDNN in fp32, else in quads") {
  const auto order = [](const ProductPaths& paths) { return packed_order(DType::bf16, 128, 64, paths); };
  CHECK(order({{own, own, own, wide}}) == PackedOrder::quads);
  CHECK(order({{own, own, wide, wide}}) == PackedOrder::quads);  // what decodes reads them
  CHECK(order({{own, wide, own, wide}}) == PackedOrder::rows);
  CHECK(packed_order(DType::bf16, 128, 64) == order(rule_of_machine()));
  if (bf16_unit() == Bf16Products::widened) return;
  const PackedOrder pairs = order({{own, unit, unit, unit}});
  CHECK((pairs == PackedOrder::pairs64 || pairs == PackedOrder::rows));  // an oneDNN may read none
  CHECK(order({{own, unit, own, wide}}) == pairs);
  CHECK(order({{own, own, unit, wide}}) == pairs);
  CHECK(order({{unit, own, own, wide}}) == pairs);
  CHECK(order({{own, own, own, unit}}) == PackedOrder::quads);  // gradients read no packed weights
}

TEST_CASE("prepacked weights give the definition's product on every path, and unpack is the reverse") {
  Random rng(13);
  for (const ProductPaths& paths : all_paths(bf16_unit())) {
    KernelContext ctx(2, paths);
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{128, 64}, {96, 1120}, {200, 48}}) {
      const Tensor w = random_bf16(N, K, rng);
      Tensor p = w;
      prepack(ctx, p.data(), DType::bf16, N, K);
      CHECK((p.bytes() == w.bytes()) == (packed_order(DType::bf16, N, K, paths) == PackedOrder::rows));
      for (const std::int64_t T : {1, 16, 17, 128, 129, 200}) {
        CAPTURE(text_of(paths, bf16_unit()), N, K, T);
        const Tensor x = random_bf16(T, K, rng);
        Tensor y = Tensor::filled(DType::f32, T, N, N, NAN);
        linear_forward(ctx, x.matrix(), p.matrix(), {}, y.matrix(), T, N, K, Write::overwrite, WeightOrder::prepacked);
        check_dense(y, dense(x) * dense(w).transpose(), kF32Tolerance);
        const ProductPath path = paths[class_of_rows(T)];
        if (path == unit || (path == wide && packed_order(DType::bf16, N, K, paths) == PackedOrder::rows)) continue;
        Tensor of_rows(DType::f32, T, N);  // our own kernel reads every order to the same bits
        row_gemm(ctx, x.matrix(), w.matrix(), nullptr, of_rows.matrix(), T, N, K, Write::overwrite);
        CHECK(y.bytes() == of_rows.bytes());
      }
      unpack(ctx, p.data(), DType::bf16, N, K);
      CHECK(p.bytes() == w.bytes());
    }
  }
}

TEST_CASE("what is measured are a machine's candidates, on one thread, and OpenMP is as it was") {
  const int threads = omp_get_max_threads();
  const ProductRates rates = measure_product_paths();
  CHECK(omp_get_max_threads() == threads);
  for (const ProductClass c : kProductClasses) {
    std::vector<ProductPath> paths;
    for (const PathRate& rate : rates[c]) {
      CHECK(rate.gflop_s > 0.0);
      paths.push_back(rate.path);
    }
    const auto all = measured_candidates(c, bf16_unit(), rule_of_machine());
    CHECK(paths == (all.size() > 1 ? all : std::vector<ProductPath>()));
  }
  // A process that is about to fork: in a child of one thread, none is started.
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    omp_set_num_threads(3);
    (void)measure_product_paths();
    const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
    ::_exit(std::distance(begin(tasks), end(tasks)) == 1 && omp_get_max_threads() == 3 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
