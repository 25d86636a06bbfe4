// CPU kernels against the floors of docs: GEMM in GF/s, attention in GF/s of the exact causal work, streaming kernels
// in GB/s. Threads: HOTBUNK_BENCH_THREADS, default 2.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "backends/cpu_gloo/kernels/attention.h"
#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/fused_linear.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/loss.h"
#include "backends/cpu_gloo/kernels/norm.h"
#include "backends/cpu_gloo/kernels/optimizer.h"
#include "backends/cpu_gloo/kernels/paged_attention.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "backends/cpu_gloo/kernels/rope.h"

namespace {

using namespace hotbunk;
using namespace hotbunk::kernels;

int num_threads() {
  const char* s = std::getenv("HOTBUNK_BENCH_THREADS");
  return s ? std::atoi(s) : 2;
}

/// A dense tensor of small numbers, on a cache line as the plan's buffers are.
struct Array {
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines;
  DType dtype;
  std::int64_t rows, cols;
  Array(DType t, std::int64_t r, std::int64_t c)
      : lines((static_cast<std::size_t>(r * c * size_of(t)) + sizeof(Line) - 1) / sizeof(Line)),
        dtype(t),
        rows(r),
        cols(c) {
    std::vector<float> values(static_cast<std::size_t>(r * c));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 7919) % 1000) * 1e-3f - 0.5f;
    KernelContext ctx(1);
    cast(ctx, {values.data(), DType::f32}, data(), t, r * c);
  }
  void* data() { return lines.data(); }
  std::int64_t size() const { return rows * cols * size_of(dtype); }  // bytes
  Matrix matrix() { return {data(), dtype, cols}; }
  ConstVector vector() const { return {lines.data(), dtype}; }
  float* f32() { return static_cast<float*>(data()); }
};

DType dtype_of(std::int64_t i) { return i ? DType::bf16 : DType::f32; }

void report_flops(benchmark::State& state, double flops) {
  state.counters["GF/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}
void report_bytes(benchmark::State& state, double bytes) {
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

enum Pass : std::int64_t { kForward, kDgrad, kWgrad };

/// Args: T, N, K, bf16?, pass.
void linear(benchmark::State& state) {
  const std::int64_t T = state.range(0), N = state.range(1), K = state.range(2);
  const DType t = dtype_of(state.range(3));
  KernelContext ctx(num_threads());
  Array x(t, T, K), w(t, N, K), y(t, T, N), dw(DType::f32, N, K);
  for ([[maybe_unused]] auto _ : state) {
    if (state.range(4) == kForward) linear_forward(ctx, x.matrix(), w.matrix(), {}, y.matrix(), T, N, K);
    if (state.range(4) == kDgrad) linear_dgrad(ctx, y.matrix(), w.matrix(), x.matrix(), T, N, K, Write::overwrite);
    if (state.range(4) == kWgrad) linear_wgrad(ctx, y.matrix(), x.matrix(), dw.matrix(), T, N, K, Write::accumulate);
  }
  report_flops(state, 2.0 * static_cast<double>(T * N * K));
}
void linear_shapes(benchmark::internal::Benchmark* b) {
  // MEASURED.md's shapes, then every linear of the 46M model at 8 × 512 tokens: qkv, o, gate-up, down, head.
  const std::int64_t shapes[][3] = {{1024, 4096, 4096}, {512, 2048, 2048}, {4096, 1376, 512}, {4096, 1536, 512},
                                    {4096, 512, 512},   {4096, 2752, 512}, {4096, 512, 1376}, {4096, 8192, 512}};
  for (std::int64_t bf16_operands : {0, 1})
    for (const auto& s : shapes)
      for (std::int64_t pass : {kForward, kDgrad, kWgrad}) b->Args({s[0], s[1], s[2], bf16_operands, pass});
}
BENCHMARK(linear)->Apply(linear_shapes)->ArgNames({"T", "N", "K", "bf16", "pass"})->UseRealTime();

/// Args: T, bf16?, prepacked?. One pass over 4096 × 4096 weights.
void decode_weights(benchmark::State& state) {
  const std::int64_t T = state.range(0), n = 4096;
  const DType t = dtype_of(state.range(1));
  KernelContext ctx(num_threads());
  Array x(t, T, n), w(t, n, n), y(t, T, n);
  const auto order = state.range(2) ? WeightOrder::prepacked : WeightOrder::rows;
  if (order == WeightOrder::prepacked) prepack(ctx, w.data(), t, n, n);
  for ([[maybe_unused]] auto _ : state)
    linear_forward(ctx, x.matrix(), w.matrix(), {}, y.matrix(), T, n, n, Write::overwrite, order);
  report_bytes(state, static_cast<double>(n * n * size_of(t)));
}
BENCHMARK(decode_weights)
    ->ArgsProduct({{1, 2, 4, 6, 8, 12, 16, 32, 64}, {0, 1}, {0, 1}})
    ->ArgNames({"T", "bf16", "prepacked"})
    ->UseRealTime();

/// Products of a decode step with what stands beside them: of the 46M model qkv, o, gate-up and down, and 4096 wide.
struct LayerProduct {
  const char* name;
  std::int64_t N, K;
  bool norm, gate, residual;
};
constexpr LayerProduct kLayerProducts[] = {{"norm, qkv", 1536, 512, true, false, false},
                                           {"o, residual", 512, 512, false, false, true},
                                           {"norm, gate-up, SwiGLU", 2752, 512, true, true, false},
                                           {"down, residual", 512, 1376, false, false, true},
                                           {"4096: norm, qkv", 6144, 4096, true, false, false},
                                           {"4096: norm, gate-up, SwiGLU", 8192, 4096, true, true, false}};

/// Args: T, bf16?, which of kLayerProducts. Prepacked weights, other ones in each iteration, as a step's layers have
/// them: 64 MiB of them. Fused and kernel after kernel in turn, so that a load that comes and goes meets both; medians,
/// and `ratio`: kernel after kernel by fused.
void fused_product(benchmark::State& state) {
  const std::int64_t T = state.range(0);
  const DType t = dtype_of(state.range(1));
  const LayerProduct& of = kLayerProducts[state.range(2)];
  const std::int64_t N = of.N, K = of.K, outputs = of.gate ? N / 2 : N;
  KernelContext ctx(num_threads());
  std::vector<Array> weights;
  const std::int64_t layers = std::max<std::int64_t>(1, (std::int64_t{64} << 20) / (N * K * size_of(t)));
  for (std::int64_t i = 0; i < layers; ++i) prepack(ctx, weights.emplace_back(t, N, K).data(), t, N, K);
  Array x(t, T, K), delta(t, T, K), norm(t, 1, K), sum(t, T, K), normed(t, T, K), rstd(DType::f32, 1, T);
  Array product(t, T, N), residual(t, T, N), y(t, T, outputs);
  BesideProduct beside{.swiglu = of.gate};
  if (of.norm)
    beside.norm = norm.vector(), beside.eps = 1e-5f, beside.delta = delta.matrix(), beside.sum = sum.matrix();
  if (of.residual) beside.residual = residual.matrix();
  const auto fused = [&](Matrix w) {
    fused_linear_forward(ctx, x.matrix(), w, {}, beside, y.matrix(), T, N, K, WeightOrder::prepacked);
  };
  const auto one_by_one = [&](Matrix w) {
    if (of.norm)
      add_rmsnorm_forward(ctx, x.matrix(), delta.matrix(), norm.vector(), sum.matrix(), normed.matrix(), rstd.f32(), T,
                          K, 1e-5f);
    linear_forward(ctx, of.norm ? normed.matrix() : x.matrix(), w, {}, of.gate ? product.matrix() : y.matrix(), T, N, K,
                   Write::overwrite, WeightOrder::prepacked);
    if (of.gate) swiglu_forward(ctx, product.matrix(), y.matrix(), T, N / 2);
    if (of.residual) add(ctx, y.matrix(), residual.matrix(), T, N);
  };
  std::vector<double> seconds[2];
  std::size_t calls = 0;
  const auto timed = [&](int which, Matrix w) {
    const auto begin = std::chrono::steady_clock::now();
    if (which == 1) fused(w);
    else one_by_one(w);
    seconds[which].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  };
  for ([[maybe_unused]] auto _ : state) {
    // Each has all layers before the other does, and no layer's weights just behind the other.
    timed(static_cast<int>(calls / weights.size() % 2), weights[calls % weights.size()].matrix());
    ++calls;
  }
  if (seconds[0].empty() || seconds[1].empty())
    return state.SkipWithError("needs more iterations than there are layers");
  const auto median_us = [](std::vector<double>& of_calls) {
    const auto middle = of_calls.begin() + std::ssize(of_calls) / 2;
    std::nth_element(of_calls.begin(), middle, of_calls.end());
    return *middle * 1e6;
  };
  const double after = median_us(seconds[0]), together = median_us(seconds[1]);
  state.SetLabel(of.name);
  state.counters["one_by_one_us"] = after;
  state.counters["fused_us"] = together;
  state.counters["ratio"] = after / together;
}
BENCHMARK(fused_product)
    ->ArgsProduct({{1, 8, 32}, {0, 1}, benchmark::CreateDenseRange(0, std::size(kLayerProducts) - 1, 1)})
    ->ArgNames({"T", "bf16", "product"})
    ->Iterations(2000)
    ->UseRealTime();

/// Args: bf16?. 4096 × 4096 weights into the order of products and back: bytes read and written.
void prepack_weights(benchmark::State& state) {
  const std::int64_t n = 4096;
  const DType t = dtype_of(state.range(0));
  KernelContext ctx(num_threads());
  Array w(t, n, n);
  for ([[maybe_unused]] auto _ : state) {
    prepack(ctx, w.data(), t, n, n);
    unpack(ctx, w.data(), t, n, n);
  }
  report_bytes(state, 4.0 * static_cast<double>(w.size()));
}
BENCHMARK(prepack_weights)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();

/// Args: sequences, length, heads, kv heads, head dim, bf16?, backward?. Work counted: 2 (5 backward) products over the
/// visible half.
void attention(benchmark::State& state) {
  const std::int64_t S = state.range(0), L = state.range(1);
  const HeadShape shape{state.range(2), state.range(3), state.range(4)};
  const DType t = dtype_of(state.range(5));
  KernelContext ctx(num_threads());
  const std::int64_t T = S * L, out = shape.num_heads * shape.head_dim;
  Array qkv(t, T, shape.width()), o(t, T, out), d_o(t, T, out), dqkv(t, T, shape.width());
  std::vector<float> lse(static_cast<std::size_t>(T * shape.num_heads));
  std::vector<std::int32_t> cu;
  for (std::int64_t s = 0; s <= S; ++s) cu.push_back(static_cast<std::int32_t>(s * L));
  attention_forward(ctx, qkv.matrix(), shape, cu, 0.125f, o.matrix(), lse.data());
  for ([[maybe_unused]] auto _ : state) {
    if (state.range(6) == 0) attention_forward(ctx, qkv.matrix(), shape, cu, 0.125f, o.matrix(), lse.data());
    else attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.data(), shape, cu, 0.125f, dqkv.matrix());
  }
  const double products = state.range(6) ? 5 : 2;
  report_flops(state, products * static_cast<double>(S * L * (L + 1) * shape.num_heads * shape.head_dim));
}
BENCHMARK(attention)
    ->ArgsProduct({{8}, {512}, {8}, {8}, {64}, {0, 1}, {0, 1}})
    ->ArgsProduct({{1}, {2048}, {14}, {2}, {64}, {0}, {0, 1}})
    ->ArgNames({"S", "L", "a", "k", "d", "bf16", "bwd"})
    ->UseRealTime();

/// Args: sequences, context, heads, kv heads. bf16 pool, d 64; bytes of keys and values read.
void paged_decode(benchmark::State& state) {
  const std::int64_t S = state.range(0), context = state.range(1), block = 16, blocks = context / block;
  const HeadShape shape{state.range(2), state.range(3), 64};
  KernelContext ctx(num_threads());
  Array qkv(DType::bf16, S, shape.width()), o(DType::bf16, S, shape.num_heads * 64);
  Array pool(DType::bf16, S * blocks, 2 * block * shape.num_kv_heads * 64);
  std::vector<std::int32_t> table, length(static_cast<std::size_t>(S), static_cast<std::int32_t>(context));
  for (std::int64_t i = 0; i < S * blocks; ++i) table.push_back(static_cast<std::int32_t>(i));
  for ([[maybe_unused]] auto _ : state)
    paged_decode_attention(ctx, qkv.matrix(), shape, {pool.data(), DType::bf16, S * blocks, block},
                           {table.data(), blocks, length.data()}, S, 0.125f, o.matrix());
  report_bytes(state, static_cast<double>(pool.size()));
}
BENCHMARK(paged_decode)
    ->ArgsProduct({{1, 16}, {512, 4096}, {14}, {2}})
    ->ArgsProduct({{1, 32}, {256}, {8}, {8, 2}})
    ->ArgNames({"S", "context", "a", "k"})
    ->UseRealTime();

/// The streaming kernels of the 46M training step, 4096 tokens. Arg: bf16?.
template <class Run>
void streaming(benchmark::State& state, Run&& run) {
  KernelContext ctx(num_threads());
  report_bytes(state, run(state, ctx, dtype_of(state.range(0)), 4096));
}
void rmsnorm(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType t, std::int64_t T) {
    Array x(t, T, 512), w(t, 1, 512), y(t, T, 512), rstd(DType::f32, 1, T);
    for ([[maybe_unused]] auto _ : state)
      rmsnorm_forward(ctx, x.matrix(), w.vector(), y.matrix(), rstd.f32(), T, 512, 1e-5f);
    return 2.0 * static_cast<double>(x.size());
  });
}
void rmsnorm_grad(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType t, std::int64_t T) {
    Array x(t, T, 512), w(t, 1, 512), dy(t, T, 512), dx(t, T, 512), rstd(DType::f32, 1, T), dw(DType::f32, 1, 512);
    for ([[maybe_unused]] auto _ : state)
      rmsnorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), dx.matrix(), Write::accumulate, dw.f32(),
                       Write::accumulate, T, 512);
    return 4.0 * static_cast<double>(x.size());
  });
}
void swiglu(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType t, std::int64_t T) {
    Array gu(t, T, 2752), act(t, T, 1376);
    for ([[maybe_unused]] auto _ : state) swiglu_forward(ctx, gu.matrix(), act.matrix(), T, 1376);
    return static_cast<double>(gu.size() + act.size());
  });
}
void swiglu_grad(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType t, std::int64_t T) {
    Array gu(t, T, 2752), dgu(t, T, 2752), act(t, T, 1376);
    for ([[maybe_unused]] auto _ : state) swiglu_backward(ctx, act.matrix(), gu.matrix(), dgu.matrix(), T, 1376);
    return static_cast<double>(2 * gu.size() + act.size());
  });
}
void rope_rows(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType t, std::int64_t T) {
    const HeadShape shape{8, 8, 64};
    Array qkv(t, T, shape.width());
    std::vector<std::int32_t> positions;
    for (std::int32_t i = 0; i < T; ++i) positions.push_back(i % 512);
    const std::vector<float> inv_freq = rope_inv_freq(64, 10000.0);
    for ([[maybe_unused]] auto _ : state)
      rope(ctx, qkv.matrix(), positions.data(), inv_freq.data(), T, shape, RopeDirection::forward);
    return 2.0 * static_cast<double>(T * 1024 * size_of(t));
  });
}
void logprobs(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType, std::int64_t T) {
    Array logits(DType::f32, T, 8192), out(DType::f32, 3, T);
    std::vector<std::int32_t> targets(static_cast<std::size_t>(T), 5);
    for ([[maybe_unused]] auto _ : state)
      token_logprobs(ctx, {logits.f32(), 8192, 8192}, targets.data(), 1.0f, out.f32(), out.f32() + T, nullptr, T);
    return static_cast<double>(logits.size());
  });
}
void adamw(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType, std::int64_t) {
    const std::int64_t n = 46'000'000;
    Array p(DType::f32, 1, n), g(DType::f32, 1, n), m(DType::f32, 1, n), v(DType::f32, 1, n);
    zero(ctx, v.f32(), n * 4);
    for ([[maybe_unused]] auto _ : state)
      adamw_step(ctx, {}, p.f32(), {g.f32(), DType::f32}, m.f32(), v.f32(), n, nullptr, nullptr);
    return 7.0 * 4 * static_cast<double>(n);  // four read, three written
  });
}
void gradient_norm(benchmark::State& s) {
  streaming(s, [](auto& state, auto& ctx, DType, std::int64_t) {
    const std::int64_t n = 46'000'000;
    Array g(DType::f32, 1, n);
    for ([[maybe_unused]] auto _ : state) benchmark::DoNotOptimize(sum_of_squares(ctx, {g.f32(), DType::f32}, n));
    return 4.0 * static_cast<double>(n);
  });
}
BENCHMARK(rmsnorm)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();
BENCHMARK(rmsnorm_grad)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();
BENCHMARK(swiglu)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();
BENCHMARK(swiglu_grad)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();
BENCHMARK(rope_rows)->DenseRange(0, 1)->ArgName("bf16")->UseRealTime();
BENCHMARK(logprobs)->Arg(0)->ArgName("bf16")->UseRealTime();
BENCHMARK(adamw)->Arg(0)->ArgName("bf16")->UseRealTime();
BENCHMARK(gradient_norm)->Arg(0)->ArgName("bf16")->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
