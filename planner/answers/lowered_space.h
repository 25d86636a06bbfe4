// The part of a search's space that executes, and the bytes of its plans: where a scenario is lowered, `plan` ranks
// layouts that `run` takes, by what their plans map.
#pragma once
#include "planner/search/search.h"

namespace hotbunk {

/// Bytes of the plans of a lowered scenario's points. The scenario outlives it.
PlanBytes plan_bytes(const Scenario&);

/// Drops the knobs' values that unsupported_to_execute (spec/validate.h) refuses whatever the others are. `bucketed`:
/// the mechanism that the scenario's bucketed sync is priced as.
void keep_what_executes(RlSpace&, const Scenario&, SyncMechanism bucketed);

}  // namespace hotbunk
