// Bytes that one rank sends over each kind of link in one iteration, phase by phase: what decides where a layout waits.
#pragma once
#include <string>
#include <vector>

#include "planner/rl/rl_model.h"

namespace hotbunk {

/// One exchange of a phase. `wire` counts what the rank sends (DESIGN: wire) over the fast links of its node, and over
/// its port of the network: a ring across nodes passes each node's ports together once, all-to-all sends what is for
/// other nodes. `host` counts both directions.
struct LinkUse {
  RlPhase phase{};
  std::string what;  // "tp", "dp gradients", …
  double node_wire = 0, network_wire = 0, host_bytes = 0;
};

/// Of the rank that price_traffic counts. Uses of no bytes are left out. `iterate`: a whole RL iteration; else the
/// optimizer steps alone.
std::vector<LinkUse> link_bytes(const RlModel&, const RlPoint&, const TrainPrice&, const RolloutPrice&, bool iterate);

/// What one rank sends of a ring, on average: of a node's edges one leaves through its ports, the others stay inside.
/// Together the collective's wire bytes.
struct RingBytes {
  double node = 0, network = 0;
};
RingBytes ring_bytes(OpKind, const GroupShape&, double payload);

}  // namespace hotbunk
