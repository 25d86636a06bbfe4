// The closed form's seconds against the graph executed in virtual time, phase by phase: same plan, same CostModel.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <map>

#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "planner/answers/answers.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"

using namespace hotbunk;

namespace {

/// The phase of the closed form that a phase of the plan counts to; nullopt: what runs once, or not in every iteration.
std::optional<RlPhase> phase_of(const std::string& name) {
  static const std::map<std::string, RlPhase> phases = {{"rollout", RlPhase::rollout},
                                                        {"exchange", RlPhase::rollout},
                                                        {"sync", RlPhase::sync},
                                                        {"sleep_optimizer", RlPhase::sleep},
                                                        {"sleep_train", RlPhase::sleep},
                                                        {"sleep_rollout", RlPhase::sleep},
                                                        {"wake_rollout", RlPhase::wake},
                                                        {"wake_kv", RlPhase::wake},
                                                        {"wake_train", RlPhase::wake},
                                                        {"reference", RlPhase::reference},
                                                        {"old_logprobs", RlPhase::old_logprobs},
                                                        {"train", RlPhase::train}};
  const auto found = phases.find(name);
  return found == phases.end() ? std::nullopt : std::optional(found->second);
}

using PhaseSeconds = std::array<double, num_rl_phases>;
double sum_of(const PhaseSeconds& s) {
  double sum = 0.0;
  for (double x : s) sum += x;
  return sum;
}

/// Seconds of a step that a rank spends in each phase, mean over ranks and steps.
PhaseSeconds simulated(const Scenario& s, const CostModel& model) {
  const auto plan = lower(s);
  if (!plan) throw std::runtime_error(render(plan.error()));
  auto driver = LengthDriver::create(*plan, s);
  if (!driver) throw std::runtime_error(render(driver.error()));
  const ModelCost cost(model);
  SimBackend backend(s.cluster, cost, {.timeline = {.first_step = 0, .last_step = -1}, .enforce_capacity = false});
  RunOptions run{.steps = static_cast<std::int32_t>(s.steps), .local_ranks = {}};
  for (Rank r = 0; r < plan->num_ranks(); ++r) run.local_ranks.push_back(r);
  const auto trace = execute(*plan, backend, **driver, run);
  if (!trace) throw std::runtime_error(render(trace.error()));
  PhaseSeconds out{};
  for (const PhaseSpan& p : trace->phases)
    if (const auto phase = phase_of(plan->phases[static_cast<std::size_t>(p.phase)].name); phase && p.step > 0)
      out[static_cast<std::size_t>(*phase)] +=
          1e-9 * static_cast<double>(p.end_ns - p.start_ns) / plan->num_ranks() / static_cast<double>(s.steps);
  return out;
}

struct Compared {
  PhaseSeconds closed{}, graph{};
  double error() const { return sum_of(closed) / sum_of(graph) - 1.0; }
  double error(std::size_t phase) const { return graph[phase] > 0 ? closed[phase] / graph[phase] - 1.0 : 0.0; }
  /// The largest relative error of a phase that takes more than `share` of the iteration.
  double worst(double share) const {
    double out = 0.0;
    for (std::size_t i = 0; i < num_rl_phases; ++i)
      if (graph[i] > share * sum_of(graph)) out = std::max(out, std::abs(error(i)));
    return out;
  }
  std::string text() const {
    std::string out = fmt::format("iteration {:+.2f} %:", 100.0 * error());
    for (std::size_t i = 0; i < num_rl_phases; ++i)
      if (graph[i] > 0)
        out += fmt::format("  {} {:.4g} s {:+.2f} %", name_of(static_cast<RlPhase>(i)), graph[i], 100.0 * error(i));
    return out;
  }
};

Compared compare(const Scenario& s) {
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) throw std::runtime_error(render(pricer.error()));
  return {(*pricer)->price((*pricer)->point()).seconds, simulated(s, (*pricer)->train().cost())};
}

Scenario named(const std::string& file, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(std::string(HOTBUNK_SOURCE_DIR) + "/scenarios/" + file, sets);
  if (!s) throw std::runtime_error(render(s.error()));
  return *s;
}

}  // namespace

TEST_CASE("seconds: closed form = graph for the scenarios that lower, phase by phase") {
  struct Case {
    const char* file;
    std::vector<std::string> sets;
    double whole, phase;  // bounds: of the iteration, of each phase that takes 1 % of it
  };
  const std::vector<std::string> few = {"algorithm.prompts=16",
                                        "workload.prompt_tokens={mean: 512, max: 512, distribution: fixed}",
                                        "workload.response_tokens={mean: 512, max: 512, distribution: fixed}"};
  const auto few_and = [&](const char* set) {
    std::vector<std::string> sets = few;
    sets.emplace_back(set);
    return sets;
  };
  const Case cases[] = {
      {"demo.yaml", {"steps=1"}, 0.03, 0.15},
      {"qwen2.5-0.5b-cpu.yaml", {}, 0.04, 0.15},
      {"qwen2.5-7b-fsdp8.yaml", few, 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("rollout.sleep_level=1"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("rollout.sleep=false"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("train.offload=none"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("train.recompute=none"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("train.recompute=selective"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("sync.transport=collective"), 0.02, 0.08},
      {"qwen2.5-7b-fsdp8.yaml", few_and("sync.verify=true"), 0.02, 0.08},
      // Lengths as drawn: means of several iterations, for one iteration's longest response is what it is.
      {"qwen2.5-7b-fsdp8.yaml",
       {"model.num_hidden_layers=4", "steps=6", "algorithm.prompts=48", "rollout.max_running_requests=64",
        "workload.response_tokens={mean: 512, max: 2048}"},
       0.05,
       0.10},
      {"qwen2.5-7b-fsdp8.yaml",
       {"model.num_hidden_layers=4", "steps=6", "algorithm.prompts=24",
        "workload.response_tokens={mean: 512, max: 2048}"},
       0.05,
       0.10},
      {"demo.yaml", {"steps=1", "rollout.sleep_level=1"}, 0.03, 0.15},
  };
  for (const auto& c : cases) {
    const Compared seconds = compare(named(c.file, c.sets));
    INFO(c.file << " " << fmt::format("{}", fmt::join(c.sets, " ")) << " " << seconds.text());
    CHECK(std::abs(seconds.error()) < c.whole);
    CHECK(seconds.worst(0.01) < c.phase);
  }
}
