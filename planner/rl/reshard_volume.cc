#include "planner/rl/reshard_volume.h"

#include <algorithm>
#include <vector>

#include "layout/layout.h"
#include "layout/reshard.h"

namespace hotbunk {

double most_received_elements(const ModelSpec& model, std::int64_t tp, std::int64_t engines, bool strided) {
  const std::int64_t ranks = tp * engines;
  const Layout have = fsdp_layout(ranks);
  const Layout need = rollout_layout(tp, engines, strided ? EngineOrder::strided : EngineOrder::contiguous);
  // Layers are alike: one stands for all of them.
  ModelSpec thin = model;
  thin.layers = 1;
  std::vector<double> received(static_cast<std::size_t>(ranks), 0.0);
  for (const ParamSpec& parameter : parameters_of(thin)) {
    const TensorMove move{parameter.name, holdings(have, thin, parameter), holdings(need, thin, parameter)};
    const Reshard moved = reshard({&move, 1});
    const double times = parameter.layer >= 0 ? static_cast<double>(model.layers) : 1.0;
    for (std::size_t i = 0; i < received.size(); ++i) received[i] += times * static_cast<double>(moved.received[i]);
  }
  return *std::max_element(received.begin(), received.end());
}

}  // namespace hotbunk
