// How much a rank receives when FSDP shards become rollout slices. A file of its own because layout's rectangles and
// the plan graph's copies are both called Box.
#pragma once
#include <cstdint>

#include "spec/model.h"

namespace hotbunk {

/// Elements that the worst of tp * engines ranks receives, shard to shard: every parameter as Shard(0) over all ranks
/// before, sliced for engines of `tp` after. Dense models.
double most_received_elements(const ModelSpec&, std::int64_t tp, std::int64_t engines, bool strided);

}  // namespace hotbunk
