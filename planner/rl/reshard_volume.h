// How much a rank receives when FSDP shards become rollout slices. A file of its own because layout's rectangles and
// the plan graph's copies are both called Box.
#pragma once
#include <cstdint>
#include <vector>

#include "spec/model.h"

namespace hotbunk {

/// Engines over all ranks; `stage_layers`: one number per pipeline stage.
struct EngineShape {
  std::int64_t tp = 1, cp = 1;
  std::vector<std::int64_t> stage_layers;
  std::int64_t engines = 1;
  bool strided = false;
};

/// Elements that the worst rank receives, shard to shard: every parameter as Shard(0) over groups of `shards` ranks
/// before (0: over all), the layers of its stage sliced for tensor parallelism after. Dense models.
double most_received_elements(const ModelSpec&, const EngineShape&, std::int64_t shards = 0);

}  // namespace hotbunk
