// How many layers of each kind a model has, dense ones first, mixture-of-experts layers behind them; and how many
// tensors.
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

/// Weights of routed experts, each by its own Hugging Face name.
inline double expert_tensor_count(const ModelSpec& m) {
  if (!m.moe || m.moe->experts == 0) return 0.0;
  return 3.0 * static_cast<double>(m.moe->experts) * static_cast<double>(layer_kinds(m).moe);
}

/// Parameters of the model by their Hugging Face names.
inline double tensor_count(const ModelSpec& m) {
  // Attention 4 and norms 2, biases and head norms where the family has them, then the MLP, or router and experts.
  const double per_layer =
      6.0 + (m.qkv_bias ? 3.0 : 0.0) + (m.qk_norm ? 2.0 : 0.0) + (m.mla ? 3.0 : 0.0) + (m.output_norms ? 2.0 : 0.0);
  const double mlp = m.gated_mlp ? 3.0 : 2.0, beside_experts = m.moe && m.moe->shared_experts > 0 ? 4.0 : 1.0;
  const LayerKinds kinds = layer_kinds(m);
  // Linear attention has nine tensors in the place of attention's.
  const double linear = static_cast<double>(m.linear_layers()) * (m.linear ? 9.0 - 4.0 - (m.qk_norm ? 2.0 : 0.0) : 0.0);
  return linear + 2.0 + (m.tie_embeddings ? 0.0 : 1.0) + per_layer * static_cast<double>(m.layers) +
         static_cast<double>(kinds.dense) * mlp + static_cast<double>(kinds.moe) * beside_experts +
         expert_tensor_count(m);
}

}  // namespace hotbunk
