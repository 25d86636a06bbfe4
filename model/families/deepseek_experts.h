// Experts as DeepSeek-V2 and V3 have them, behind dense layers, beside experts that every token takes; GLM-4.5 took
// them over.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "spec/config_reader.h"

namespace hotbunk {

/// Where keys are absent.
struct DeepseekExperts {
  std::int64_t experts = 0, experts_per_token = 1, width = 1407, shared = 0, first_dense = 0;
  /// V2: scores by softmax, a group as good as its best expert; else by sigmoid, with a bias.
  bool softmax = false;
};
inline constexpr std::string_view deepseek_expert_keys[] = {
    "num_experts_per_tok",   "moe_intermediate_size", "norm_topk_prob", "n_routed_experts",
    "n_shared_experts",      "first_k_dense_replace", "n_group",        "topk_group",
    "routed_scaling_factor", "scoring_func",          "topk_method",    "moe_layer_freq"};
void read_deepseek_experts(ConfigReader&, const DeepseekExperts&, ModelSpec&);
/// transformers' own default has experts from the fourth layer (V3), the first one (V2) or the second (GLM) on: that
/// there are none is said, too.
void write_deepseek_experts(const ModelSpec&, nlohmann::json&);

}  // namespace hotbunk
