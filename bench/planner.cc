// Layouts priced per second. Every point counted is distinct and priced in full: memory, time and traffic.
#include <benchmark/benchmark.h>

#include "planner/choices.h"
#include "planner/plan_form.h"
#include "planner/validate_tables.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

Scenario scenario_of(const char* text) {
  auto s = load_scenario_text(text, "bench.yaml");
  if (!s) throw std::runtime_error(render(s.error()));
  return *s;
}

/// Everything that the closed form tells apart for a 530B GPT on 512 A100 (what takes Calculon 226 s for 68,344
/// points).
TrainSpace whole_space(const ModelSpec& m) {
  TrainSpace s = default_train_space(m, 512, 8, 2240, TrainEngine::megatron);
  s.tp = {1, 2, 4, 8, 16, 32};
  s.vpp = divisors(m.layers);
  s.micro_batch = divisors(2240);
  std::erase_if(s.micro_batch, [](std::int64_t b) { return b > 64; });
  s.sharding = {Sharding::replicated, Sharding::zero1, Sharding::zero2, Sharding::zero3};
  s.optimizer_on_host = {false, true};
  s.ulysses = {1, 2, 4, 8};  // context parallelism by all-to-all
  return s;
}

void train_530b_on_512(benchmark::State& state) {
  const Scenario s = scenario_of("model: qwen2.5-0.5b\ncluster: {gpu: a100-sxm-80gb, nodes: 1, gpus_per_node: 1}\n");
  ClusterSpec cluster = s.cluster;
  cluster.nodes = 64, cluster.gpus_per_node = 8;
  auto hardware = hardware_for(cluster, catalog_root());
  if (!hardware) throw std::runtime_error(render(hardware.error()));
  const TrainModel model(gpt_model(105, 20480, 128, 51200, 2048), {.sequence = 2048}, CostModel(*hardware, cluster),
                         {});
  const TrainSpace space = whole_space(model.model());
  std::int64_t priced = 0;
  for (auto _ : state) {
    const TrainSearch found = search_train(model, space, {.keep = 10, .threads = static_cast<int>(state.range(0))});
    priced += found.priced;
    benchmark::DoNotOptimize(found.best.data());
  }
  state.counters["layouts/s"] = benchmark::Counter(static_cast<double>(priced), benchmark::Counter::kIsRate);
  state.counters["layouts"] = static_cast<double>(priced) / static_cast<double>(state.iterations());
}
BENCHMARK(train_530b_on_512)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

/// DeepSeek-V3 GRPO on 2,048 H800: training, rollout, sync and sleep together.
void rl_deepseek_on_2048(benchmark::State& state) {
  Scenario s = scenario_of("model: qwen2.5-0.5b\ncluster: {gpu: h800-sxm-80gb, nodes: 1, gpus_per_node: 1}\n");
  const Scenario v3 = scenario_of("model: deepseek-v3\ncluster: {gpu: h800-sxm-80gb, nodes: 1, gpus_per_node: 1}\n");
  s.model = v3.model;
  s.cluster.nodes = 256, s.cluster.gpus_per_node = 8;
  s.train.engine = TrainEngine::megatron;
  s.algorithm.prompts = 512, s.algorithm.samples_per_prompt = 16;
  s.profile = "megatron";
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) throw std::runtime_error(render(pricer.error()));
  const RlSpace space = default_rl_space(s);
  RlSearch found;
  for (auto _ : state) {
    found = search_rl((*pricer)->rl(), space, {.keep = 10, .threads = 2});
    benchmark::DoNotOptimize(found.best.data());
  }
  state.counters["points"] = static_cast<double>(found.points);
  state.counters["priced"] = static_cast<double>(found.priced);
  state.counters["fit"] = static_cast<double>(found.feasible);
  state.counters["complete"] = found.complete ? 1 : 0;
}
BENCHMARK(rl_deepseek_on_2048)->UseRealTime()->Unit(benchmark::kSecond);

/// What `plan` adds for 8 GPUs: the joint search with its table.
void choose_8_gpus(benchmark::State& state) {
  const Scenario s = scenario_of(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {layout: {dp: 8}, micro_batch_tokens: 16384}\nrollout: {layout: {tp: 4, dp: 2}}\n");
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) throw std::runtime_error(render(pricer.error()));
  for (auto _ : state) benchmark::DoNotOptimize(choose(**pricer, {}));
}
BENCHMARK(choose_8_gpus)->UseRealTime()->Unit(benchmark::kMillisecond);

/// One scenario explained, models built included: the heart of a `plan` of 8 GPUs.
void explain_8_gpus(benchmark::State& state) {
  const Scenario s = scenario_of(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {layout: {dp: 8}}\nrollout: {layout: {tp: 4, dp: 2}}\n");
  for (auto _ : state) {
    const auto pricer = ScenarioPricer::make(s, catalog_root());
    if (!pricer) throw std::runtime_error(render(pricer.error()));
    benchmark::DoNotOptimize(explain(**pricer));
  }
}
BENCHMARK(explain_8_gpus)->Unit(benchmark::kMillisecond);

/// The plan's memory (all phases, device and host) and one rank's traffic in closed form, another layout each time.
void plan_form_7b_on_8(benchmark::State& state) {
  Scenario s = scenario_of(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {layout: {dp: 8}}\nrollout: {engine: hotbunk, layout: {tp: 4, dp: 2}}\nalgorithm: {reference: true}\n");
  const PlanForm form(s.model);
  std::int64_t layouts = 0;
  for (auto _ : state) {
    s.train.micro_batch_tokens = 16384 + layouts % 4096;
    s.train.recompute = static_cast<Recompute>(layouts % 3);
    benchmark::DoNotOptimize(form.memory(s));
    benchmark::DoNotOptimize(form.traffic(s, 0, one_run_each(s)));
    ++layouts;
  }
  state.counters["layouts/s"] = benchmark::Counter(static_cast<double>(layouts), benchmark::Counter::kIsRate);
}
BENCHMARK(plan_form_7b_on_8)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace hotbunk

BENCHMARK_MAIN();
