// Where a scenario's plan is lowered, the answers about its bytes are the plan's, and not the estimates that price
// every other layout.
#pragma once
#include "planner/answers/answers.h"
#include "planner/price/evaluate.h"

namespace hotbunk {

/// What the scenario's plan takes; nullopt where nothing lowers it. The plan is not verified.
struct PlanAnswer {
  Plan plan;
  PlanMemory memory;
  std::vector<ShiftOp> shifts;
};
std::optional<PlanAnswer> plan_answer_of(const Scenario&);

/// Replaces the bytes of a price by the plan's: the highest live bytes around training, rollout and sync, and on the
/// host. Overhead is what the plan counts as such. It fits when the plan does (check_fit in trace/static_memory.h).
void use_plan_bytes(const Scenario&, const PlanMemory&, RlPrice&);

/// The same in mapped bytes, which are what a device must have.
void use_mapped_bytes(const MappedBytes&, RlPrice&);

/// Live bytes and shifts (plan_shifts.h) of the scenario's plan, as every answer prices it; false: nothing lowers it.
bool use_plan(const Scenario&, const CostModel&, RlPrice&);
/// The same with mapped bytes, as the search has them.
bool use_mapped_plan(const Scenario&, const CostModel&, RlPrice&);
/// The same for another point of a lowered scenario.
bool use_plan_at(const Scenario&, const RlPoint&, const CostModel&, RlPrice&);

/// Each phase's live peak, those that matter by category.
CostNode plan_memory_tree(const PlanMemory&);

/// The scenario that the flags of a point select (with_point); nullopt where nothing lowers it.
std::optional<Scenario> scenario_at(const Scenario&, const RlPoint&);

/// How often the blocks of one iteration run when all lengths are the mean ones.
PlanRuns expected_runs(const Scenario&, const RlPoint&);

/// Rank 0, with sequences of the mean length.
MicroBatchStreams micro_batch_streams(const Scenario&, const RlPoint&, const PlanAnswer&, const CostModel&);

/// Bytes over each kind of link of rank 0, in the sync of the rank that reads most, in an iteration of `runs`, from the
/// plan's calls and payloads.
std::vector<LinkUse> plan_link_bytes(const Scenario&, const PlanAnswer&, const PlanRuns&, const CostModel&);

}  // namespace hotbunk
