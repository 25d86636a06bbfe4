// What an op costs: the only thing the simulator asks of a cost model.
#pragma once
#include <cstdint>

#include "exec/driver.h"
#include "graph/plan.h"

namespace hotbunk {

/// A pure function. It may look at sizes only through the actual shapes of the op's tensors and, for attention kinds,
/// Sizes::attention_pairs: the simulator asks once per rank and op where those do not change.
struct OpCost {
  virtual ~OpCost() = default;
  /// Time of the op on its stream once it starts, at its rank's share of the device, >= 0. Collectives: from the moment
  /// when the last participant has arrived; each participant is asked, and the slowest answer holds for all.
  virtual std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const = 0;
};

}  // namespace hotbunk
