// How long a block of a plan keeps the streams of a rank busy: each op at the price that the simulator pays, bodies
// priced once.
#pragma once
#include <string>
#include <vector>

#include "planner/cost/cost_model.h"

namespace hotbunk {

struct StreamSeconds {
  struct Busy {
    std::string stream;
    double seconds = 0.0;
  };
  std::vector<Busy> busy;  // of the plan's streams, in their order
  /// From the first op to the last, where streams wait for nothing but the plan's events, and collectives find all
  /// ranks there: what the order of the plan costs at least. Streams of a device that get in each other's way cost more
  /// (`simulate`).
  double elapsed = 0.0;
};
/// One run of the block with these sizes.
StreamSeconds stream_seconds(const Plan&, Rank, const Block&, const Sizes&, const CostModel&);

}  // namespace hotbunk
