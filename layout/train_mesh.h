// Which rank of training is where: the scenario's dimensions as a mesh.
#pragma once
#include "layout/mesh.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Axes "tp", "cp", "dp" and "pp" in the layout's order, all of them there; "cp": context parallelism of either kind,
/// whose ranks share their sequences. Ranks of one "dp" coordinate work on the same samples.
Mesh train_mesh(const TrainLayout&);

/// How the data ranks share what the engine shards: groups of neighbours hold one copy together, one shard each (HSDP
/// where there is more than one group). DDP shards nothing.
struct ShardMesh {
  std::int64_t shards = 1, replicas = 1;
  std::int64_t ranks() const { return shards * replicas; }
};
/// Of a layout whose fsdp divides its data ranks.
ShardMesh shard_mesh(const TrainSpec&);

}  // namespace hotbunk
