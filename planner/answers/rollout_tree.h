// The rollout's part of `explain`'s time tree.
#pragma once
#include "planner/answers/answers.h"

namespace hotbunk {

/// Prefill, decode, tail and exchange of a point's rollout, each step by what takes it. `price`: the point's.
std::vector<CostNode> rollout_nodes(const RlModel&, const RlPoint&, const RolloutPrice& price);

}  // namespace hotbunk
