// Seconds of a lowered scenario's shifts: the very ops that its plan maps, unmaps and copies with, each at the price
// that the simulator pays for it.
#pragma once
#include <span>

#include "planner/price/evaluate.h"
#include "planner/rl/rl_model.h"

namespace hotbunk {

/// Of an iteration: one op after the other, as the plan's order has them.
ShiftsSeconds shifts_seconds(std::span<const ShiftOp>, const CostModel&);

/// Replaces a price's estimate of its shifts, the iteration's seconds with them. Twice is once.
void use_plan_shifts(const ShiftsSeconds&, RlPrice&);

}  // namespace hotbunk
