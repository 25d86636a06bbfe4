// The model that a launch trains: a name of the hub or the catalogue, a path that ends in one, or Megatron's sizes.
#pragma once

#include "interop/rules.h"

namespace hotbunk {

/// Fills `model` and the scenario's `model` from the roles of the rule "model", or from what the user chose. E153 where
/// neither says which it is; what spec/model_source.h reports of one that it does.
void find_launch_model(RuleInput&);

/// Megatron's sizes, as find_launch_model reads them, and what Megatron-LM takes for them; false: a family that they do
/// not spell.
bool give_model_sizes(RuleOutput&);

}  // namespace hotbunk
