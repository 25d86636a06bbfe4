// The trees of `explain`: where every byte of the fullest moments and every second of the iteration comes from.
#pragma once
#include "planner/answers/answers.h"

namespace hotbunk {

/// Bytes of one rank at each moment of an iteration, by what they are; `price` is the point's.
CostNode memory_tree(const ScenarioPricer&, const RlPoint&, const RlPrice& price, const TrainPrice&);

/// Seconds of each phase, by what takes them; of a lowered scenario plan_time_tree (plan_time_tree.h) says it.
CostNode time_tree(const ScenarioPricer&, const RlPoint&, const RlPrice& price, const TrainPrice&);

/// Host bytes of one rank, by what they are.
CostNode host_tree(const ScenarioPricer&, const RlPoint&, const RlPrice& price);

}  // namespace hotbunk
