// Gradients of weights in bf16: what the kernels of fp32 gradients make, rounded once; and the optimizer that reads
// them.
#include "backends/cuda/kernels/many.h"
#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

constexpr Dim3 one_block{1};

/// Gradients of n numbers in both dtypes, of the same numbers before, some of which a kernel changes.
struct Gradients {
  Gradients(Device& d, std::size_t n, Draw& draw)
      : narrow(d.memory, "bf16", draw.numbers<Bf16>(n)), wide(d.memory, "f32", n) {
    for (std::size_t i = 0; i < n; ++i) wide[i] = from_bf16(narrow[i]);
    d.memory.mark_written(reinterpret_cast<std::uint64_t>(wide.begin()), static_cast<std::int64_t>(4 * n));
    before = wide.values();
  }
  /// changes(i): whether element i is another than before. In fp32: bf16 may round a small sum away.
  template <class Changes>
  void check(const Changes& changes) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      INFO("element " << i);
      CHECK(narrow[i] == ptx::to_bf16(wide[i]));
      CHECK((wide[i] != before[i]) == changes(i));
    }
  }
  void check() {
    check([](std::size_t) { return true; });
  }
  Array<Bf16> narrow;
  Array<float> wide;
  std::vector<float> before;  // of `wide`
};

/// Runs NAME_bf16_f32 and NAME_bf16_bf16: run(name, where gradients begin).
template <class Run, class Changes>
void in_both(const std::string& kernel, Gradients& g, const Run& run, const Changes& changes) {
  INFO(kernel);
  run(kernel + "_bf16_f32", g.wide.begin());
  run(kernel + "_bf16_bf16", g.narrow.begin());
  g.check(changes);
}
template <class Run>
void in_both(const std::string& kernel, Gradients& g, const Run& run) {
  in_both(kernel, g, run, [](std::size_t) { return true; });
}

}  // namespace

TEST_CASE("gradients in bf16 are those in fp32, rounded once", "[kernels][gradients]") {
  Draw draw(29);
  constexpr int T = 7, H = 20;
  const auto numbers = [&](Device& d, std::size_t n) {
    return std::make_unique<Array<Bf16>>(d.memory, "numbers", draw.numbers<Bf16>(n));
  };
  const auto of_rows = [&](Device& d, std::size_t n) {
    return std::make_unique<Array<float>>(d.memory, "of rows", draw.numbers<float>(n));
  };
  for (const int accumulate : {0, 1}) {
    {
      Device d("sinks");
      constexpr int a = 4, v = 5;
      const auto g = numbers(d, T * a * v), o = numbers(d, T * a * v), sinks = numbers(d, a);
      const auto lse = of_rows(d, T * a);
      Gradients ds(d, a, draw);
      in_both("attention_sinks_backward", ds, [&](const std::string& kernel, auto* to) {
        d.run(kernel, {a}, 64, g->begin(), o->begin(), lse->begin(), sinks->begin(), to, T, a, v, accumulate);
      });
    }
    {
      Device d("elementwise");
      const auto parts = of_rows(d, T * H);
      Gradients db(d, H, draw);
      const auto run = [&](const std::string& dtype, auto* to) {
        d.run("column_sums_" + dtype, one_block, 64, parts->begin(), to, T, H, accumulate);
      };
      run("f32", db.wide.begin()), run("bf16", db.narrow.begin());
      db.check();
    }
    {
      Device d("matmul");
      const auto dy = numbers(d, T * H), x = numbers(d, T * H);
      Gradients dw(d, H * H, draw);
      in_both("matmul_tn", dw, [&](const std::string& kernel, auto* to) {
        const Bf16* none = nullptr;
        d.run(kernel, one_block, 128, dy->begin(), H, x->begin(), none, to, H, H, H, T, accumulate);
      });
    }
    {
      // Rows of each of two experts in two segments: of both one sum.
      Device d("grouped");
      constexpr int N = 6, experts = 2, segments = 4;
      const auto dy = numbers(d, T * N), x = numbers(d, T * H);
      Array<std::int32_t> offsets(d.memory, "offsets", std::vector<std::int32_t>{0, 2, 3, 5, T});
      Gradients dw(d, experts * N * H, draw), db(d, experts * N, draw);
      in_both("grouped_matmul_tn", dw, [&](const std::string& kernel, auto* to) {
        d.run(kernel, {1, experts}, 128, dy->begin(), N, x->begin(), offsets.begin(), to, T, 0, N, H, segments, experts,
              accumulate);
      });
      in_both("grouped_bias", db, [&](const std::string& kernel, auto* to) {
        d.run(kernel, {1, experts}, 32, dy->begin(), offsets.begin(), to, T, 0, segments, experts, N, 0, N, accumulate);
      });
    }
  }
  Device d("embedding");
  const auto dy = numbers(d, T * H);
  Array<std::int32_t> ids(d.memory, "ids", std::vector<std::int32_t>{3, 5, 3, 9, 3, 5, 4}), chain(d.memory, "chain", T);
  d.run("embedding_chain", one_block, 32, ids.begin(), chain.begin(), T);
  Gradients dtable(d, 4 * H, draw);
  const auto run = [&](const std::string& kernel, auto* to) {
    d.run(kernel, {T}, 32, ids.begin(), chain.begin(), dy->begin(), to, T, H, 3, 7, 1.7f);
  };
  // Of rows 3 to 6 there is no token of 6.
  in_both("embedding_backward", dtable, run, [](std::size_t i) { return i / H < 3; });
}

TEST_CASE("gradients in bf16 are summed and stepped as the same numbers in fp32 are", "[kernels][gradients]") {
  Device d("optimizer");
  Draw draw(31);
  constexpr std::size_t n = 300;
  Gradients g(d, n, draw);
  const auto p0 = draw.numbers<float>(n);
  Array<float> lr(d.memory, "lr", {1e-2f, 3.0f}), c(d.memory, "c", std::vector<float>{0.5f});
  const auto stepped = [&](const std::string& dtype, const void* gradients) {
    Array<float> p(d.memory, "p", p0), m(d.memory, "m", std::vector<float>(n)), v(d.memory, "v", std::vector<float>(n));
    Array<double> partial(d.memory, "partial", 1);
    SquaredTensors squares{};
    squares.x[0] = gradients;
    squares.many = {.n = {n}, .first_block = {0, 1}, .count = 1};
    d.run("sum_squares_partial_" + dtype, one_block, 64, squares, partial.begin());
    SteppedTensors t{};
    t.g[0] = gradients, t.p[0] = p.begin(), t.m[0] = m.begin(), t.v[0] = v.begin(), t.many = squares.many;
    d.run("adamw_" + dtype, one_block, 64, t, lr.begin(), c.begin(), 0.9f, 0.99f, 1e-8f, 0.1f);
    return std::tuple{partial[0], p.values(), m.values(), v.values()};
  };
  const auto wide = stepped("f32", g.wide.begin());
  CHECK(std::get<1>(wide) != p0);
  CHECK(stepped("bf16", g.narrow.begin()) == wide);
}
