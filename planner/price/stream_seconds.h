// How long a block of a plan keeps the streams of a rank busy: each op at the price that the simulator pays, bodies
// priced once.
#pragma once
#include <array>

#include "planner/cost/cost_model.h"

namespace hotbunk {

struct StreamSeconds {
  std::array<double, num_streams> busy{};
  /// From the first op to the last, where streams wait for nothing but the plan's events, and collectives find all
  /// ranks there: what the order of the plan costs at least. Streams of a device that get in each other's way cost more
  /// (`simulate`).
  double elapsed = 0.0;
};
/// One run of the block with these sizes.
StreamSeconds stream_seconds(const Plan&, Rank, const Block&, const Sizes&, const CostModel&);

}  // namespace hotbunk
