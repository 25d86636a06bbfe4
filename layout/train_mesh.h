// Which rank of training is where: the scenario's dimensions as a mesh.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/mesh.h"
#include "layout/pipeline.h"
#include "layout/train_weights.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Axes "tp", "cp", "ulysses", "dp" and "pp" in the layout's order, all of them there; "ulysses" behind "cp" where the
/// order leaves it out. Ranks of one "dp" coordinate work on the same samples.
Mesh train_mesh(const TrainLayout&);

/// How the data ranks share what the engine shards: groups of neighbours hold one copy together, one shard each (HSDP
/// where there is more than one group). DDP shards nothing. Each of them may be `tensor` ranks that have a part of
/// every layer: of experts either a part of each, or, spread over `experts` ranks, which are all of them, whole ones.
/// `expert_data`: neighbours among the data ranks over which whole experts are spread as well: each holds others, or
/// its tensor-parallel places parts of others; with both, data rank d's place t has those from (d·experts + t)·E/ep on.
/// Then of an expert there are that many times fewer shards, or, where
/// nothing is sharded, copies.
struct ShardMesh {
  std::int64_t shards = 1, replicas = 1, tensor = 1, experts = 1, expert_data = 1;
  std::int64_t stages = 1;  // of a pipeline, each with a mesh of its own
  std::int64_t data() const { return shards * replicas; }
  std::int64_t ranks() const { return data() * tensor * stages; }
  ExpertSpread spread() const { return {experts, expert_data}; }
  /// Ranks that hold one copy of all parameters of a stage in so many shards.
  std::int64_t holders(std::int64_t in_shards) const { return (in_shards == 1 ? expert_data : in_shards) * tensor; }
  std::int64_t holders() const { return holders(shards); }
  /// Of parameters in so many shards: into how many an expert is cut, and how many copies of them there are.
  std::int64_t expert_shards(std::int64_t in_shards) const { return in_shards == 1 ? 1 : in_shards / expert_data; }
  std::int64_t expert_replicas() const { return data() / expert_data / expert_shards(shards); }
};
/// Of a layout whose fsdp divides its data ranks.
ShardMesh shard_mesh(const TrainSpec&);

/// Rows that a token of a micro-batch sends to the data ranks that have its experts; 0: they are where it is.
std::int64_t rows_sent_of_token(const Scenario&);

/// The most rows that may come to a rank's experts in a micro-batch: all ranks that spread experts send theirs, as many
/// of each token as it may take experts of one rank.
std::int64_t most_rows_received(const Scenario&);

/// The ranks of a pipeline stage by tensor-parallel place, and there by place among the data ranks.
std::vector<std::vector<std::int64_t>> data_ranks(const TrainLayout&, std::int64_t stage = 0);

/// The stages' chunks of the model, in model order. Errors: E244 (layout/pipeline.h).
Result<std::vector<StageChunk>> train_stages(const Scenario&);
/// What each stage of a layout has, in all its chunks. Internal fault where train_stages() fails.
std::vector<StagePart> stage_parts(const Scenario&);

}  // namespace hotbunk
