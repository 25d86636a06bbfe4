// The plan of a scenario that is priced and not lowered op by op: another framework's training and engine, other
// layouts. What sleeps, wakes, maps, copies and waits is there as in any plan; what computes are *priced blocks*, ops
// that take what the closed form says (graph/price.h). Simulated, never executed.
#pragma once
#include "graph/plan.h"
#include "planner/answers/answers.h"

namespace hotbunk {

struct PricedJob {
  Scenario scenario;  // as it is played: what it left to be chosen (transition, order of ranks) is chosen
  Plan plan;
};
/// All ranks of a role do what the fullest rank of the closed form does. On two sets of GPUs the plan has two roles,
/// trainer and engines. E263, E301: the scenario's layout has no price (ScenarioPricer::why_unpriced).
Result<PricedJob> priced_job(const ScenarioPricer&);

/// One optimizer step on sequences that are all as long as the model's setting says: the rows of published tables,
/// which no scenario names. The point divides.
PricedJob priced_training(const TrainModel&, const TrainPoint&, const ClusterSpec&);

}  // namespace hotbunk
