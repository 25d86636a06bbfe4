// What `explain` turns one step at a time: the layouts around a scenario's own.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// Sampling one step ahead of training, where both sides have GPUs of their own and do not yet.
std::optional<Lever> one_step_off(const ScenarioPricer&, const RlPoint&);

/// What a scenario asks for that its other keys leave without effect on the price. `lowered`: which is a plan's, and no
/// estimate.
std::vector<std::string> without_effect(const Scenario&, bool lowered);
/// "" or which tensor is larger than the sync's bucket, how it travels, and what a bucket of its own would cost.
std::string oversized_tensor(const ScenarioPricer&, const RlPoint&);

/// The framework has what `p` asks for beyond `own`, and the loader takes the scenario that it is, for the same layout.
bool is_launched(const ScenarioPricer&, const RlPoint& own, const RlPoint& p);

/// Layouts that differ by one step in one knob, each with what changes. The loader takes all of them.
std::vector<std::pair<std::string, RlPoint>> neighbours(const ScenarioPricer&, const RlPoint&);

}  // namespace hotbunk
