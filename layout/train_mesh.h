// Which rank of training is where: the scenario's dimensions as a mesh.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/mesh.h"
#include "layout/pipeline.h"
#include "layout/train_weights.h"
#include "spec/expert_mesh.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Axes "tp", "cp", "ulysses", "dp" and "pp" in the layout's order, all of them there; "ulysses" behind "cp" where the
/// order leaves it out. Ranks of one "dp" coordinate work on the same samples.
Mesh train_mesh(const TrainLayout&);

/// How the data ranks share what the engine shards: groups of neighbours (data_ranks()) hold one copy together, one
/// shard each (HSDP where there is more than one group). DDP shards nothing. Each of them may be `tensor` ranks that
/// have a part of every layer; of experts, places of blocks do (spec/expert_mesh.h): i = k places + p of place p of the
/// k-th of `experts.spread` blocks that follow one another, it has part i % etp of the experts from (i / etp) E / ep
/// on. Blocks are numbered by data rank, and there by tensor-parallel place. What is cut into shards has of an
/// expert as many as it has blocks with the same experts among its ranks; where nothing is sharded, each of them has a
/// copy.
struct ShardMesh {
  std::int64_t shards = 1, replicas = 1, tensor = 1;
  ExpertMesh experts = {};
  std::int64_t stages = 1;  // of a pipeline, each with a mesh of its own
  std::int64_t data() const { return shards * replicas; }
  std::int64_t ranks() const { return data() * tensor * stages; }
  /// Ranks that hold one copy of all parameters of a stage in so many shards.
  std::int64_t holders(std::int64_t in_shards) const { return (in_shards == 1 ? experts.spread : in_shards) * tensor; }
  std::int64_t holders() const { return holders(shards); }
  /// Of the ranks that hold one copy of all experts, those with the same columns of some.
  std::int64_t expert_columns_ranks() const {
    return (shards > 1 ? shards * tensor : experts.places * experts.spread) / experts.columns();
  }
  /// Of parameters in so many shards: into how many an expert is cut, and how many copies of them there are.
  std::int64_t expert_shards(std::int64_t in_shards) const {
    return in_shards == 1 ? 1 : in_shards * experts.blocks / experts.spread;
  }
  std::int64_t expert_replicas() const { return data() * experts.blocks / experts.spread / expert_shards(shards); }
};
/// Of a layout whose fsdp divides its data ranks.
ShardMesh shard_mesh(const Scenario&);

/// Rows that a token of a micro-batch sends to the data ranks that have its experts, one for each part of each; 0: they
/// are where it is.
std::int64_t rows_sent_of_token(const Scenario&);

/// The most rows that may come to a rank's experts in a micro-batch: all ranks that spread experts send theirs, as many
/// of each token as it may take experts of one rank.
std::int64_t most_rows_received(const Scenario&);

/// The ranks of a pipeline stage by tensor-parallel place, and there by place among the data ranks: shard group by
/// shard group in the order of their first ranks, each group ascending. So they all ascend, but where the ranks of a
/// dimension that layout.shard_over leaves out stand between those of one that it names.
std::vector<std::vector<std::int64_t>> data_ranks(const TrainLayout&, std::int64_t stage = 0);

/// The ranks of a stage by place in their block (spec/expert_mesh.h), and there block by block.
std::vector<std::vector<std::int64_t>> block_ranks(const TrainLayout&, const ExpertMesh&, std::int64_t stage = 0);

/// The stages' chunks of the model, in model order. Errors: E244 (layout/pipeline.h).
Result<std::vector<StageChunk>> train_stages(const Scenario&);
/// What each stage of a layout has, in all its chunks. Internal fault where train_stages() fails.
std::vector<StagePart> stage_parts(const Scenario&);

}  // namespace hotbunk
