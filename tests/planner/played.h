// Priced plans in virtual time, phase by phase.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "exec/length_driver.h"
#include "lowering/phases.h"
#include "planner/priced/priced_plan.h"
#include "sim/model_cost.h"
#include "sim/rank_classes.h"
#include "sim/sim_backend.h"

namespace hotbunk {

struct Played {
  /// Of an iteration: from when the last rank enters a phase, and from when the first one does.
  std::array<double, num_rl_phases> seconds{}, from_first{};
  Trace trace;
};

inline RlPhase rl_phase_of(PlanPhase p) {
  switch (p) {
    case PlanPhase::sync:
      return RlPhase::sync;
    case PlanPhase::reference:
      return RlPhase::reference;
    case PlanPhase::old_logprobs:
      return RlPhase::old_logprobs;
    case PlanPhase::values:
      return RlPhase::values;
    case PlanPhase::critic:
      return RlPhase::critic;
    case PlanPhase::train:
      return RlPhase::train;
    case PlanPhase::framework:
      return RlPhase::framework;
    default:
      return is_sleep(p)                                     ? RlPhase::sleep
             : is_transition(p) || p == PlanPhase::wake_work ? RlPhase::wake
                                                             : RlPhase::rollout;
  }
}

/// One iteration. A phase lasts until its last rank leaves it. Stages of a pipeline that have less to move than the
/// fullest one enter the next phase sooner, bring up what they need there, and wait. `folded`: as `simulate` plays
/// GPUs, over shared links.
inline Played play(const PricedJob& job, const CostModel& model, bool folded = false) {
  auto driver = LengthDriver::create(job.plan, job.scenario);
  if (!driver) throw std::runtime_error(render(driver.error()));
  const ModelCost cost(model);
  SimOptions options{.timeline = {.first_step = 0, .last_step = -1}, .enforce_capacity = false};
  if (folded) {
    options.granularity = Granularity::calls;
    options.links = &model;
    (*driver)->take_steps_together();
    const std::int64_t node = job.scenario.cluster.gpus_per_node;
    const std::vector<std::int64_t> neighbours = {node / job.scenario.cluster.even_numa_domains(), node};
    options.classes = RankClasses::fold(job.plan, cost, (*driver)->rank_classes(1, 1), neighbours);
  }
  const std::vector<Rank> players = options.classes.value_or(RankClasses::unfolded(job.plan.num_ranks())).players();
  SimBackend backend(job.scenario.cluster, cost, options);
  const RunOptions run{.steps = 1, .local_ranks = players};
  auto trace = execute(job.plan, backend, **driver, run);
  if (!trace) throw std::runtime_error(render(trace.error()));
  Played out;
  struct Stay {
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0, end = 0;
  };
  std::map<std::int16_t, Stay> stays;
  for (const PhaseSpan& p : trace->phases) {
    if (p.step == 0) continue;
    Stay& stay = stays[p.phase];
    stay.first = std::min(stay.first, p.start_ns), stay.last = std::max(stay.last, p.start_ns);
    stay.end = std::max(stay.end, p.end_ns);
  }
  for (const auto& [phase, stay] : stays) {
    const PlanPhase name = phase_named(job.plan.phases[static_cast<std::size_t>(phase)].name);
    if (name == PlanPhase::samples) continue;  // waiting for the others
    const auto at = static_cast<std::size_t>(rl_phase_of(name));
    out.seconds[at] += 1e-9 * static_cast<double>(stay.end - stay.last);
    out.from_first[at] += 1e-9 * static_cast<double>(stay.end - stay.first);
  }
  out.trace = std::move(*trace);
  return out;
}

}  // namespace hotbunk
