// The part of a search's space that executes, the bytes and the seconds of its plans: where a scenario is lowered,
// `plan` ranks layouts that `run` takes, by what their plans map and how long they take.
#pragma once
#include "planner/search/search.h"

namespace hotbunk {

/// Bytes and seconds of the plans of a lowered scenario's points. Scenario and model outlive it.
PlanPrices plan_prices(const Scenario&, const CostModel&);

/// Drops the knobs' values that unsupported_to_execute (spec/validate.h) refuses whatever the others are. `bucketed`:
/// the mechanism that the scenario's bucketed sync is priced as.
void keep_what_executes(RlSpace&, const Scenario&, SyncMechanism bucketed);

}  // namespace hotbunk
