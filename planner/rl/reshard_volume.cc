#include "planner/rl/reshard_volume.h"

#include <algorithm>
#include <vector>

#include "layout/layout.h"
#include "layout/reshard.h"

namespace hotbunk {

double most_received_elements(const ModelSpec& model, const EngineShape& engine, std::int64_t shards) {
  const auto stages = static_cast<std::int64_t>(engine.stage_layers.size());
  const std::int64_t ranks = engine.tp * engine.cp * stages * engine.engines;
  const Layout have = shards > 0 ? fsdp_layout(shards, ranks / shards) : fsdp_layout(ranks);
  const auto order = engine.strided ? EngineOrder::strided : EngineOrder::contiguous;
  // The layers of a stage are alike: one stands for all of them.
  EngineAxes axes{engine.tp, engine.cp, {}};
  for (std::int64_t i = 0; i < stages; ++i) axes.stages.push_back({i, 0, {i, i + 1}});
  const Layout need = rollout_layout(axes, engine.engines, order);
  ModelSpec thin = model;
  thin.layers = stages;
  std::vector<double> received(static_cast<std::size_t>(ranks), 0.0);
  for (const ParamSpec& parameter : parameters_of(thin)) {
    const TensorMove move{parameter.name, holdings(have, thin, parameter), holdings(need, thin, parameter)};
    const Reshard moved = reshard({&move, 1});
    const auto at = static_cast<std::size_t>(std::max(parameter.layer, 0));
    const double times = parameter.layer >= 0 ? static_cast<double>(engine.stage_layers[at]) : 1.0;
    for (std::size_t i = 0; i < received.size(); ++i) received[i] += times * static_cast<double>(moved.received[i]);
  }
  return *std::max_element(received.begin(), received.end());
}

}  // namespace hotbunk
