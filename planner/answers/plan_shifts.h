// Seconds of a lowered scenario's iteration, from its plan: the very ops that it maps, unmaps and copies with, each at
// the price that the simulator pays for it, and its blocks as they are replayed.
#pragma once
#include <span>

#include "planner/price/evaluate.h"
#include "planner/price/plan_seconds.h"
#include "planner/rl/rl_model.h"

namespace hotbunk {

/// Of an iteration: one op after the other, as the plan's order has them.
ShiftsSeconds shifts_seconds(std::span<const ShiftOp>, const CostModel&);

/// What an iteration computes and synchronises.
struct ComputedSeconds {
  double rollout = 0, sync = 0, reference = 0, old_logprobs = 0, train = 0;  // sync: of an iteration on average
  static ComputedSeconds of(const Scenario&, const PlanSeconds&);
};
/// Sets a price's seconds, phase by phase.
void use_plan_seconds(const ComputedSeconds&, const ShiftsSeconds&, RlPrice&);

}  // namespace hotbunk
