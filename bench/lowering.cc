// What a plan of many ranks costs: FSDP2 of a 7B over all of them, rollout engines of TP 4 on the same ones. The plan
// is lowered and verified, evaluated (fit, peaks, traffic, seconds per stream) and its hash taken, as `hotbunk plan`
// does. Run from the repository's root; one process for each size, so that peak_mib is its own.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <stdexcept>

#include "lowering/lower.h"
#include "planner/price/evaluate.h"
#include "planner/price/plan_seconds.h"
#include "planner/rl/rl_model.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "trace/static_memory.h"

namespace hotbunk {
namespace {

Scenario on_nodes(std::int64_t nodes) {
  const std::int64_t ranks = 8 * nodes;
  auto s = load_scenario("scenarios/qwen2.5-7b-fsdp8.yaml",
                         {fmt::format("cluster.nodes={}", nodes), fmt::format("train.layout.dp={}", ranks),
                          "rollout.layout.tp=4", "sync.transport=collective",
                          fmt::format("rollout.layout.dp={}", 2 * nodes), fmt::format("algorithm.prompts={}", ranks)});
  if (!s) throw std::runtime_error(render(s.error()));
  return *s;
}

void lower_verify_evaluate(benchmark::State& state) {
  const Scenario s = on_nodes(state.range(0) / 8);
  const auto hardware = hardware_for(s, catalog_root());
  if (!hardware) return state.SkipWithError(render(hardware.error()).c_str());
  const CostModel cost(*hardware, s.cluster);
  PlanRuns runs;
  runs.micro_batches = 4, runs.trained_tokens = 4096, runs.optimizer_steps = 1;
  for (auto _ : state) {
    const auto plan = lower(s);  // verified
    if (!plan) return state.SkipWithError(render(plan.error()).c_str());
    benchmark::DoNotOptimize(check_fit(*plan));
    benchmark::DoNotOptimize(memory_of(s, *plan));
    benchmark::DoNotOptimize(traffic_of(*plan, 0, runs));
    benchmark::DoNotOptimize(plan_seconds(s, train_point_of(s), *plan, cost));
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
