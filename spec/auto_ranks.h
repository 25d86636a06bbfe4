// Numbers that a scenario leaves open with `auto`: what the others leave of the ranks, or the least that is legal.
#pragma once
#include <span>
#include <string>

#include "spec/scenario.h"
#include "spec/validate.h"

namespace hotbunk {

/// Writes the values of the keys that said auto (scenario.open). Of the dimensions of a layout that are open `dp`, else
/// the first of them, takes what the others leave; those others are 1, `rollout.layout.tp` the fewest ranks whose half
/// of the memory share holds the weights. `train.micro_batch_tokens` holds the longest sequence. E203 where the others
/// do not divide the ranks, or where both sides of a disaggregated job leave it open.
Diagnostics fill_auto(Scenario&, const ScenarioLocator&);

/// "rollout.layout.tp 2, train.micro_batch_tokens 9216": what was chosen so, but for dp, which has no choice.
std::string auto_choices(const Scenario&);

}  // namespace hotbunk
