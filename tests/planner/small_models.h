// Small models on a made-up GPU, of which a price can be derived by hand.
#pragma once
#include <algorithm>

#include "planner/train/train_model.h"
#include "planner/validate/validate_tables.h"
#include "spec/family.h"

namespace hotbunk {

inline ClusterSpec cluster_of(std::int64_t gpus, double scale = 1.0) {
  ClusterSpec c;
  c.gpu.name = "test-gpu";
  c.gpu.memory_bandwidth = {2e12 * scale, "test"};
  c.gpu.flops = {{"bf16", {3e14, "test"}}, {"fp32", {2e13, "test"}}};
  c.gpu.nvlink_bandwidth = {3e11 * scale, "test"};
  c.gpu.pcie_bandwidth = {2.5e10 * scale, "test"};
  c.network_bandwidth = {2.5e10 * scale, "test"};
  c.gpus_per_node = 8;
  c.nodes = std::max<std::int64_t>(1, gpus / 8);
  return c;
}

inline FrameworkProfile plain_frame() {
  FrameworkProfile f;
  f.forward_kernels.value = 0;
  return f;
}

inline TrainModel model_of(const ModelSpec& m, std::int64_t gpus, FrameworkProfile f = plain_frame(),
                           double scale = 1.0) {
  const ClusterSpec c = cluster_of(gpus, scale);
  return {m, {.sequence = 2048}, CostModel(hardware_from_datasheet(c), c), f};
}

inline ModelSpec small_gpt() { return gpt_model(8, 1024, 16, 32000, 2048); }

inline ModelSpec small_moe() {
  ModelSpec m = gpt_model(8, 1024, 16, 32000, 2048);
  m.family = find_family("qwen3_moe");
  m.gated_mlp = true;
  m.layer_norm = m.qkv_bias = m.o_bias = m.mlp_bias = m.tie_embeddings = false;
  m.learned_positions = false;
  m.moe = MoeSpec{
      .experts = 16, .experts_per_token = 2, .expert_intermediate = 512, .shared_experts = 1, .first_dense_layers = 1};
  return m;
}

/// 13 layers of which the first 3 are dense: a model whose pipelines hold up to five kinds of stages.
inline ModelSpec dense_first_moe() {
  ModelSpec m = small_moe();
  m.layers = 13;
  m.moe->first_dense_layers = 3;
  return m;
}

}  // namespace hotbunk
