// Where the seconds of a lowered scenario's iteration go, by its plan: what the leading stream computes, by op, what it
// waits for the others, what they take from it.
#pragma once
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"

namespace hotbunk {

/// `price`: of the plan (use_plan_seconds).
CostNode plan_time_tree(const Scenario&, const TrainPoint&, const Plan&, const PlanSeconds&, const ShiftsSeconds&,
                        const RlPrice& price);

}  // namespace hotbunk
