// How many layers of each kind a model has: dense ones first, mixture-of-experts layers behind them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "spec/model.h"

namespace hotbunk {

struct LayerKinds {
  std::int64_t dense = 0, moe = 0;
};
inline LayerKinds layer_kinds(const ModelSpec& m) {
  if (!m.moe || m.moe->experts == 0) return {m.layers, 0};
  const std::int64_t dense = std::min(m.layers, m.moe->first_dense_layers);
  return {dense, m.layers - dense};
}

}  // namespace hotbunk
