// Streams, sections and group families are the plan's, found by name: what is said of a plan, and what the simulator
// makes of it, does not hang on their numbers.
#include "tests/renumbered.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>

#include "exec/length_driver.h"
#include "graph/verify.h"
#include "lowering/lower.h"
#include "planner/price/evaluate.h"
#include "planner/price/plan_seconds.h"
#include "planner/rl/rl_model.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/json.h"
#include "tests/paths.h"
#include "trace/summary.h"

using namespace hotbunk;

namespace {

/// Streams by name.
std::string text_of(const Plan& plan, const StreamSeconds& s) {
  std::map<std::string, std::pair<double, double>> of;
  for (std::size_t i = 0; i < plan.streams.size(); ++i)
    if (s.busy[i] != 0.0 || s.waited[i] != 0.0) of[plan.streams[i].name] = {s.busy[i], s.waited[i]};
  return fmt::format("{} s, launched {}, paced {}, busy and waited for {}\n", s.elapsed, s.launched, s.paced, of);
}

std::string text_of(const PlanSpace& space) {
  const auto peak = [](const PlanPeak& p) {
    return fmt::format("{} of {} mapped {}\n", p.bytes, fmt::join(p.by_category, " "), p.mapped_bytes);
  };
  std::string out = fmt::format("phase {}: {}", static_cast<int>(space.peak_phase), peak(space.whole));
  for (const PlanPeak& p : space.phases) out += peak(p);
  return out;
}

std::string memory_text(const Scenario& s, const Plan& plan) {
  std::string out;
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const PlanMemory memory = memory_of(s, plan, r);
    out += text_of(memory.device) + text_of(memory.host);
  }
  for (std::size_t program = 0; program < plan.programs.size(); ++program)
    for (const ShiftOp& op : shifts_of(s, plan, program))
      out += fmt::format("{} {} {} {} x {} B of {}, every {}\n", name_of(op.phase), name_of(op.kind), name_of(op.space),
                         op.count, op.bytes, op.section, op.every);
  return out;
}

std::string traffic_text(const Plan& plan) {
  const PlanRuns runs{.prefill = {2, 40, 7},
                      .decode = {5, 21, 21},
                      .reference = 4,
                      .old_logprobs = 4,
                      .micro_batches = 4,
                      .trained_tokens = 192,
                      .optimizer_steps = 2,
                      .checkpoints = 1,
                      .exports = 1};
  std::vector<std::string> lines;
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    for (const PlanTraffic& t : traffic_of(plan, r, runs))
      lines.push_back(fmt::format("rank {} {} {} {}: {} calls, {} B, padding {} B", r, name_of(t.phase), t.group,
                                  name_of(t.op), t.calls, t.payload_bytes, t.padding_bytes));
  std::ranges::sort(lines);
  return fmt::format("{}", fmt::join(lines, "\n"));
}

CostModel cost_of(const Scenario& s) {
  const auto hardware = hardware_for(s.cluster, catalog_root());
  if (!hardware) FAIL(render(hardware.error()));
  return CostModel(*hardware, s.cluster);
}

std::string seconds_text(const Scenario& s, const Plan& plan, const CostModel& cost) {
  const PlanSeconds t = plan_seconds(s, train_point_of(s), plan, cost);
  std::string out;
  for (const StreamSeconds& part :
       {t.training.reference, t.training.old_logprobs, t.training.train, t.rollout.prefill.seconds,
        t.rollout.decode.seconds, t.rollout.tail.seconds, t.rollout.exchange, t.sync})
    out += text_of(plan, part);
  return out + fmt::format("{} slots", t.rollout.slots);
}

/// Phases, memory and traffic of a simulation.
std::string simulated_text(const Scenario& s, const Plan& plan, const CostModel& cost) {
  auto driver = LengthDriver::create(plan, s);
  if (!driver) FAIL(render(driver.error()));
  const ModelCost price(cost);
  SimBackend sim(s.cluster, price);
  RunOptions run{.steps = 1, .local_ranks = {}};
  for (Rank r = 0; r < plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  const auto trace = execute(plan, sim, **driver, run);
  if (!trace) FAIL(render(trace.error()));
  auto summary = summarize(plan, s, *trace);
  std::vector<std::string> traffic;
  for (const auto& row : summary.at("traffic")) traffic.push_back(json_text(row));
  std::ranges::sort(traffic);
  return fmt::format("{}\n{}\n{}\n{}", json_text(summary.at("phases")), json_text(summary.at("memory")),
                     json_text(summary.at("iteration_seconds")), fmt::join(traffic, "\n"));
}

}  // namespace

TEST_CASE("memory, traffic, seconds and a simulation are the same whatever numbers a plan's names have") {
  struct Way {
    const char* scenario;
    std::vector<std::string> sets;
  };
  for (const Way& way : {Way{"demo", {"sync.verify=true", "algorithm.reference=true"}},
                         {"pipeline-parallel-cpu", {}},
                         {"interleaved-cpu", {}},
                         {"zero-bubble-cpu", {}},
                         {"tensor-parallel-cpu", {}},
                         {"hybrid-shards-cpu", {}},
                         {"ulysses-cpu", {}},
                         {"context-parallel-cpu", {}},
                         {"expert-parallel-cpu", {}},
                         {"expert-mesh-cpu", {}},
                         {"expert-columns-cpu", {}},
                         {"attention-groups-cpu", {}},
                         {"engine-context-cpu", {}},
                         {"offload-cpu", {}},
                         {"demo", {"rollout.sleep_level=1", "sync.transport=collective"}}}) {
    CAPTURE(way.scenario, way.sets);
    const auto loaded = load_scenario(fmt::format("{}/scenarios/{}.yaml", source_folder, way.scenario), way.sets);
    if (!loaded) FAIL(render(loaded.error()));
    const Scenario& s = *loaded;
    const Plan plan = lower(s).value();
    const CostModel cost = cost_of(s);
    const std::string memory = memory_text(s, plan), traffic = traffic_text(plan),
                      seconds = seconds_text(s, plan, cost), simulated = simulated_text(s, plan, cost);
    for (const std::uint64_t seed : {1, 2}) {
      CAPTURE(seed);
      const Plan other = test::renumbered(plan, seed);
      CHECK(other.streams != plan.streams);
      CHECK(verify(other) == std::vector<std::string>{});
      CHECK(memory_text(s, other) == memory);
      CHECK(traffic_text(other) == traffic);
      CHECK(seconds_text(s, other, cost) == seconds);
      CHECK(simulated_text(s, other, cost) == simulated);
    }
  }
}
