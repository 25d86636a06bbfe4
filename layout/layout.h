// Layout: the complete answer to "who holds what" of a model's weights.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/mesh.h"
#include "layout/pipeline.h"
#include "layout/placement.h"

namespace hotbunk {

/// Two meshes over the same ranks (equal where there are no experts; check_expert_mesh has passed), and what they do:
///   axis "pp"    the layers of `stages` (embedding on the first, final norm and head on the last, a tied embedding on
///                both); without it every rank has all layers
///   axis "ep"    routed experts, E / ep consecutive ones per rank (expert mesh)
///   axis "tp"    tensor parallelism by role (tensor_parallel), "etp" that of experts
///   axis "fsdp"  Shard(0) of what the others left: FSDP2; beside an axis "replicate" or "dp" HSDP
/// Every other axis replicates.
struct Layout {
  Mesh dense, expert;
  std::vector<StageChunk> stages;
  std::int64_t vocab_multiple = 1;  // see tensor_parallel
  std::optional<Mesh> mlp = {};     // of dense MLPs, where it is another: attention data parallelism of an engine
};

/// FSDP2 over `shard` consecutive ranks, repeated `replicas` times (HSDP; 1 = plain FSDP).
Layout fsdp_layout(std::int64_t shard, std::int64_t replicas = 1);

/// One rollout engine: tp is its fastest axis, pipeline stages the slowest.
struct EngineAxes {
  std::int64_t tp = 1, cp = 1;
  std::vector<StageChunk> stages;  // one chunk per stage; empty: every rank has all layers
};

/// Rollout engines of n = tp * cp * stages ranks each.
///   contiguous: engine = rank / n, place in it = rank % n; strided: engine = rank % engines, place = rank / engines.
enum class EngineOrder : std::uint8_t { contiguous, strided };
Layout rollout_layout(const EngineAxes&, std::int64_t engines, EngineOrder order = EngineOrder::contiguous);
inline Layout rollout_layout(std::int64_t tp, std::int64_t engines, EngineOrder order = EngineOrder::contiguous) {
  return rollout_layout({tp, 1, {}}, engines, order);
}

/// What the axes of tensor parallelism and sharding leave a rank of a parameter, whether or not the parameter is of the
/// rank's stage and experts.
Rectangle slice_of(const Layout&, const ModelSpec&, const ParamSpec&, std::int64_t rank);

/// The rectangle of one parameter on one rank; empty where the rank has none of it.
/// Throws InternalError where the layout does not fit the model (validation comes first).
Rectangle held_by(const Layout&, const ModelSpec&, const ParamSpec&, std::int64_t rank);

/// held_by for every rank of the layout, each in a list of at most one rectangle: the input of reshard().
std::vector<std::vector<Rectangle>> holdings(const Layout&, const ModelSpec&, const ParamSpec&);

}  // namespace hotbunk
