// What a run computes depends on, by name and value: what ranks compare when they meet, and what a saved plan keeps of
// the scenario that it was made from. The plan's hash sees none of the learning rate, the seed, the weights, the build.
#pragma once
#include <string>

#include "base/diagnostic.h"
#include "cli/command.h"
#include "graph/plan_json.h"
#include "runtime/world.h"

namespace hotbunk {

/// Every key of the scenario that changes what a run computes, the model's config, and weights and data by content
/// (content_digest.h). Left out: name; run.*, which changes when a run gives up; cluster.*, which is filled in from the
/// machine, and of which the plan's hash holds what matters.
PlanFacts scenario_facts(const Scenario&);

/// A file of `plan --out`. Errors: the file's, E501 to E505.
Result<PlanFile> saved_plan(const std::string& path);

/// Those, the plan, the options of `run` that are given for every rank (as written, or their default) and the build:
/// version and build id, so that one source compiled for two machines differs.
PlanFacts run_facts(const Job&, const PlanFacts& options);

/// Hash of those that a step's bits depend on (P7): two runs of one hash have the same tokens, weights and metrics in
/// the steps that both have. What forms products on this machine is among them; the first and the last step, when
/// checkpoints are written (is_of_the_run), how ranks talk to each other and what is only looked at are not.
std::string run_hash(const PlanFacts& run_facts);

/// "optimizer.lr: saved 1e-06, now 5", the first few, and how many more. Empty when nothing differs.
std::vector<std::string> differences(const PlanFacts& then, const std::string& its_name, const PlanFacts& now,
                                     const std::string& our_name);

/// Every rank of the world calls it. E705 on all of them when one's facts are not rank 0's: each prints its own
/// differences, rank 0 and those that agree all ranks'. Nobody is taken for dead after it.
Status check_agreement(World&, const PlanFacts&);

}  // namespace hotbunk
