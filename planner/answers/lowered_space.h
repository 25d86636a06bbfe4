// The part of a search's space that executes, the bytes of its plans and the seconds of their shifts: where a scenario
// is lowered, `plan` ranks layouts that `run` takes, by what their plans map.
#pragma once
#include "planner/search/search.h"

namespace hotbunk {

/// Bytes and shifts of the plans of a lowered scenario's points. The shifts add to the sync's own seconds
/// and are never below 0, so the bounds of the search hold. Scenario and model outlive it.
PlanBytes plan_bytes(const Scenario&, const CostModel&);

/// Drops the knobs' values that unsupported_to_execute (spec/validate.h) refuses whatever the others are. `bucketed`:
/// the mechanism that the scenario's bucketed sync is priced as.
void keep_what_executes(RlSpace&, const Scenario&, SyncMechanism bucketed);

}  // namespace hotbunk
