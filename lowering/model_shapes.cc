#include "lowering/model_shapes.h"

namespace hotbunk {

ModelShapes::Units ModelShapes::units(const StagePart& stage, std::int64_t tp, std::int64_t world,
                                      const ExpertMesh& experts) {
  const std::scoped_lock lock(mutex_);
  Units& known = units_[{stage, tp, world, experts}];
  if (!known)
    known = std::make_shared<const std::vector<ShardedUnit>>(train_units(model_, stage, tp, world, 0, experts));
  return known;
}

ModelShapes::Units ModelShapes::flat_units(const WrapSpec& wrap, const StagePart& stage, std::int64_t tp,
                                           std::int64_t world, const ExpertMesh& experts) {
  const std::scoped_lock lock(mutex_);
  Units& known = flat_units_[{wrap, stage, tp, world, experts}];
  if (!known)
    known =
        std::make_shared<const std::vector<ShardedUnit>>(hotbunk::flat_units(model_, wrap, stage, tp, world, experts));
  return known;
}

ModelShapes::Weights ModelShapes::weights(const EngineCut& cut) {
  const std::scoped_lock lock(mutex_);
  Weights& known = weights_[cut];
  if (!known) known = std::make_shared<const std::vector<LocalWeight>>(rollout_weights(model_, cut, 0));
  return known;
}

std::shared_ptr<const std::vector<StageRoom>> ModelShapes::rooms(const Pipeline& p, std::int64_t micro_batches,
                                                                 PipelinePasses which) {
  const std::scoped_lock lock(mutex_);
  auto& known = rooms_[{p.stages, p.chunks, p.schedule, micro_batches, which}];
  if (!known) known = std::make_shared<const std::vector<StageRoom>>(pipeline_room(p, micro_batches, which));
  return known;
}

}  // namespace hotbunk
