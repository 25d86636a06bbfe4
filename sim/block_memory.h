// What a block does to live memory, known before it runs: allocations do not depend on actual sizes.
#pragma once
#include <vector>

#include "graph/bound.h"
#include "trace/meter.h"

namespace hotbunk {

struct BlockMemory {
  BlockMemory(const Program&, const Block&);

  std::vector<LiveProfile> calls;  // of each call, from its own beginning
  LiveProfile whole;               // of all of them
  /// Buffers of the program that are live behind it and were not before, and the other way round.
  std::vector<BufferId> becomes_live, becomes_free;
  bool maps = false;  // it also maps or unmaps: what that may, depends on more than the block
};

}  // namespace hotbunk
