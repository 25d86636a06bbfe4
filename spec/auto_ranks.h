// `dp: auto`: the data parallel ranks, or engines, that the other dimensions leave of the cluster.
#pragma once
#include "spec/scenario.h"
#include "spec/validate.h"

namespace hotbunk {

struct AutoRanks {
  bool train = false, rollout = false;  // which of the two said auto
};

/// Writes what is left into train.layout.dp and rollout.layout.dp. E203 where the others do not divide the ranks, or
/// where both sides of a disaggregated job leave it open.
Diagnostics fill_auto_ranks(Scenario&, AutoRanks, const ScenarioLocator&);

}  // namespace hotbunk
