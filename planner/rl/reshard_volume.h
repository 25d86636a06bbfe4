// How much each rank receives when training's weights become rollout slices, shard to shard: layout/'s rectangles, of
// one layer of each kind and one expert for all of them. A file of its own because layout's rectangles and the plan
// graph's copies are both called Box.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "layout/layout.h"
#include "planner/train/train_model.h"
#include "spec/scenario.h"

namespace hotbunk {

struct RolloutPoint;

/// Both leave the padding of vocabularies out (Megatron's to 128 rows a rank, the engines' to 64), which moves the edge
/// between two ranks by so many rows at most.

/// Who holds what while training: Megatron's and ZeRO's ranks the whole slices of their stage, FSDP's a shard of them.
/// nullopt: sharded units of experts that lie on a mesh of their own, or whose data ranks are no neighbours.
std::optional<Layout> trainer_layout(const TrainPoint&, const TrainSetting&, const ModelSpec&);

/// What engines need, on as many ranks. nullopt: attention is cut otherwise than the rest (attention-dp).
std::optional<Layout> engine_layout(const RolloutPoint&, RolloutEngine, std::int64_t layers);

/// Elements that each rank receives, |need(r) \ have(r)| as reshard() counts them.
class ReshardCounter {
 public:
  explicit ReshardCounter(const ModelSpec&);
  /// Both layouts of as many ranks; their axes divide the model.
  std::vector<std::int64_t> received(const Layout& have, const Layout& need) const;
  /// Elements of each unit that FSDP cuts, a layer or all that is outside of layers, and how many there are.
  std::vector<std::pair<std::int64_t, std::int64_t>> layer_units() const;

 private:
  struct Side;
  ModelSpec model_;
  std::int64_t dense_layers_ = 0;
  std::vector<ParamSpec> outer_, dense_, moe_;  // outside of layers; of one layer of each kind, its first expert alone
};

}  // namespace hotbunk
