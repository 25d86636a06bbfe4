// What of a model's plans depends on nothing but how many ranks share it: made once for all scenarios of a search.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "layout/flat_units.h"
#include "layout/pipeline_turns.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"

namespace hotbunk {

/// May be asked by several threads at a time. The model outlives it.
class ModelShapes {
 public:
  explicit ModelShapes(const ModelSpec& model) : model_(model) {}
  using Units = std::shared_ptr<const std::vector<ShardedUnit>>;
  using Weights = std::shared_ptr<const std::vector<LocalWeight>>;
  /// Of a pipeline stage, as the first rank of `world` and of `tp` tensor-parallel ones has them, experts lying so
  /// (layout/train_weights.h).
  Units units(const StagePart&, std::int64_t tp, std::int64_t world, const ExpertMesh&);
  /// Of FSDP1 (layout/flat_units.h).
  Units flat_units(const WrapSpec&, const StagePart&, std::int64_t tp, std::int64_t world, const ExpertMesh&);
  /// Of the first tensor-parallel rank (layout/rollout_weights.h).
  Weights weights(const EngineCut&);
  /// Of every stage (layout/pipeline_turns.h); no matter of the model, but each stage's lowering asks for its own.
  std::shared_ptr<const std::vector<StageRoom>> rooms(const Pipeline&, std::int64_t micro_batches, PipelinePasses);

 private:
  const ModelSpec& model_;
  std::mutex mutex_;
  std::map<std::tuple<StagePart, std::int64_t, std::int64_t, ExpertMesh>, Units> units_;
  std::map<std::tuple<WrapSpec, StagePart, std::int64_t, std::int64_t, ExpertMesh>, Units> flat_units_;
  std::map<EngineCut, Weights> weights_;
  std::map<std::tuple<std::int64_t, std::int64_t, PipelineSchedule, std::int64_t, PipelinePasses>,
           std::shared_ptr<const std::vector<StageRoom>>>
      rooms_;
};

}  // namespace hotbunk
