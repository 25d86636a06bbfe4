// What a plan of many ranks costs: FSDP2 of a 7B over all of them, rollout engines of TP 4 on the same ones. The plan
// is lowered and verified, its memory walked and its hash taken, as `hotbunk plan` and `run` do. Run from the
// repository's root; one process for each size, so that peak_mib is its own.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <stdexcept>

#include "lowering/lower.h"
#include "spec/loader.h"
#include "trace/static_memory.h"

namespace hotbunk {
namespace {

Scenario on_nodes(std::int64_t nodes) {
  const std::int64_t ranks = 8 * nodes;
  auto s = load_scenario(
      "scenarios/qwen2.5-7b-fsdp8.yaml",
      {fmt::format("cluster.nodes={}", nodes), fmt::format("train.layout.dp={}", ranks), "rollout.layout.tp=4",
       fmt::format("rollout.layout.dp={}", 2 * nodes), fmt::format("algorithm.prompts={}", ranks)});
  if (!s) throw std::runtime_error(render(s.error()));
  return *s;
}

void lower_verify_evaluate(benchmark::State& state) {
  const Scenario s = on_nodes(state.range(0) / 8);
  for (auto _ : state) {
    const auto plan = lower(s);  // verified
    if (!plan) return state.SkipWithError(render(plan.error()).c_str());
    benchmark::DoNotOptimize(check_fit(*plan));
    benchmark::DoNotOptimize(plan_hash(*plan));
    state.counters["programs"] = static_cast<double>(plan->programs.size());
  }
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  state.counters["peak_mib"] = static_cast<double>(used.ru_maxrss) / 1024.0;
}
BENCHMARK(lower_verify_evaluate)
    ->ArgName("ranks")
    ->Arg(8)
    ->Arg(64)
    ->Arg(512)
    ->Arg(1024)
    ->Arg(16384)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace hotbunk

BENCHMARK_MAIN();
