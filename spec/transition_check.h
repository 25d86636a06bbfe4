// The transition of a scenario: what it is, and what is wrong with it beside the scenario's other keys.
#pragma once
#include "spec/transition.h"
#include "spec/validate.h"

namespace hotbunk {

/// The order that a scenario asks for. `auto`, and what is no order for these sleep settings (another placement's, of a
/// job without a rollout): hotbunk's.
TransitionOrder transition_of(const Scenario&);

/// E214 where whole-state sleep meets layer-wise offload, E225 with the step that breaks a rule.
Diagnostics check_transition(const Scenario&, const ScenarioLocator&);

}  // namespace hotbunk
