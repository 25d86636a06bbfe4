// Layouts priced per second. Every point counted is distinct and priced in full: memory, time and traffic.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "lowering/lower.h"
#include "planner/answers/choices.h"
#include "planner/validate/validate_tables.h"
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
  s.shard = divisors(512);
  s.shard.front() = -1, s.shard.pop_back();  // groups of one rank and of all have other names
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
  const RlSpace space = default_rl_space(s, (*pricer)->train().framework());
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

/// The program as a user runs it, process start to exit; CPU seconds are the process's own, user and system.
struct ProcessTimes {
  double wall_s = 0, cpu_s = 0;
};
ProcessTimes run_program(const std::vector<std::string>& words) {
  const std::string binary = HOTBUNK_BINARY;
  std::vector<const char*> arguments = {binary.c_str()};
  for (const std::string& word : words) arguments.push_back(word.c_str());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  for (int fd : {STDOUT_FILENO, STDERR_FILENO}) posix_spawn_file_actions_addopen(&quiet, fd, "/dev/null", O_WRONLY, 0);
  const auto start = std::chrono::steady_clock::now();
  pid_t pid = -1;
  const int failed =
      ::posix_spawn(&pid, binary.c_str(), &quiet, nullptr, const_cast<char**>(arguments.data()), environ);
  posix_spawn_file_actions_destroy(&quiet);
  int status = -1;
  rusage used{};
  if (failed != 0 || ::wait4(pid, &status, 0, &used) != pid || status != 0)
    throw std::runtime_error(fmt::format("{} {} failed", binary, fmt::join(words, " ")));
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return {wall.count(), seconds(used.ru_utime) + seconds(used.ru_stime)};
}

/// The value that a fraction `p` of the sorted values does not exceed (nearest rank).
double percentile(const std::vector<double>& sorted, double p) {
  return sorted[static_cast<std::size_t>(std::ceil(p * static_cast<double>(sorted.size()))) - 1];
}

void time_program(benchmark::State& state, const std::vector<std::string>& words) {
  std::vector<double> wall, cpu;
  for (auto _ : state) {
    const ProcessTimes t = run_program(words);
    state.SetIterationTime(t.wall_s);
    wall.push_back(1e3 * t.wall_s), cpu.push_back(1e3 * t.cpu_s);
  }
  std::ranges::sort(wall), std::ranges::sort(cpu);
  state.counters["p50_ms"] = percentile(wall, 0.5);
  state.counters["p99_ms"] = percentile(wall, 0.99);
  state.counters["cpu_p50_ms"] = percentile(cpu, 0.5);
}

/// One `plan` of 8 GPUs with start-up: lowered whole and searched, or priced alone.
void plan_command(benchmark::State& state, const char* name) {
  time_program(state, {"plan", (catalog_root().parent_path() / name).string()});
}
BENCHMARK_CAPTURE(plan_command, lowered, "qwen2.5-7b-fsdp8.yaml")
    ->UseManualTime()
    ->Iterations(200)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_command, priced, "qwen2.5-7b-colocated.yaml")
    ->UseManualTime()
    ->Iterations(200)
    ->Unit(benchmark::kMillisecond);

/// A launch read, with its verdict and where memory and time go.
void import_command(benchmark::State& state) {
  time_program(state,
               {"import", "verl", "--", "algorithm.adv_estimator=grpo", "data.train_batch_size=64",
                "data.max_prompt_length=1024", "data.max_response_length=3072", "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.nnodes=1", "trainer.n_gpus_per_node=8"});
}
BENCHMARK(import_command)->UseManualTime()->Iterations(20)->Unit(benchmark::kMillisecond);

/// What the search asks of a plan's training: the bytes of one phase of another layout each time.
void train_phase_7b_on_8(benchmark::State& state) {
  Scenario s = scenario_of(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {layout: {dp: 8}}\nrollout: {engine: hotbunk, layout: {tp: 4, dp: 2}}\nalgorithm: {reference: true}\n");
  ModelShapes shapes(s.model);
  std::int64_t layouts = 0;
  for (auto _ : state) {
    s.train.micro_batch_tokens = 16384 + layouts % 4096;
    s.train.recompute = static_cast<Recompute>(layouts % 3);
    benchmark::DoNotOptimize(write_phases(
        s, [](PlanPhase p) { return p == PlanPhase::train; }, shapes));
    ++layouts;
  }
  state.counters["layouts/s"] = benchmark::Counter(static_cast<double>(layouts), benchmark::Counter::kIsRate);
}
BENCHMARK(train_phase_7b_on_8)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace hotbunk

BENCHMARK_MAIN();
