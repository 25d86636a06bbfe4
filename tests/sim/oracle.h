// The slow, obvious simulator: asks at every moment which heads may start, with real-valued rates. O(calls²), no
// queue of events, no window, nothing in common with sim/ but the plan.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace hotbunk::toy {

struct OracleSpan {
  double start = -1.0, end = -1.0;
};

/// Times of every op of phase 0, block 0, of each rank, run `runs` times one after the other: [rank][run * ops + op].
/// cost[rank][op]: its price. Empty when it cannot end (deadlock).
std::vector<std::vector<OracleSpan>> oracle(const Plan&, const std::vector<std::vector<std::int64_t>>& cost,
                                            std::int64_t runs, std::int64_t ranks_per_device, std::int64_t slots);

}  // namespace hotbunk::toy
