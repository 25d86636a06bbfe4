#include "model/families/deepseek_experts.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {

void read_deepseek_experts(ConfigReader& c, const DeepseekExperts& d, ModelSpec& m) {
  MoeSpec e;
  e.experts = c.integer("n_routed_experts", d.experts, 0, c.max_experts);
  e.experts_per_token = c.integer("num_experts_per_tok", d.experts_per_token, 1, c.max_experts);
  e.expert_intermediate = c.integer("moe_intermediate_size", d.width, 1, c.max_width);
  e.shared_experts = c.integer("n_shared_experts", d.shared, 0, c.max_experts);
  e.first_dense_layers = c.integer("first_k_dense_replace", d.first_dense, 0, c.max_layers);
  e.groups = c.integer("n_group", 1, 1, c.max_experts);
  e.topk_groups = c.integer("topk_group", 1, 1, c.max_experts);
  e.norm_topk = c.boolean("norm_topk_prob", !d.softmax);
  e.routed_scaling = c.real("routed_scaling_factor", 1.0, 0.0, 1e6);
  e.sigmoid_scores = c.text("scoring_func", d.softmax ? "softmax" : "sigmoid") == "sigmoid";
  const std::string method = c.text("topk_method", d.softmax ? "greedy" : "noaux_tc");
  e.router_bias = method == "noaux_tc";
  if (method == "greedy") e.groups = e.topk_groups = 1;
  if (e.router_bias != e.sigmoid_scores)
    c.report("E412", "topk_method",
             fmt::format("topk_method {} with scores by {} is not known", method.substr(0, 50),
                         e.sigmoid_scores ? "sigmoid" : "softmax"),
             {},
             "noaux_tc (DeepSeek-V3) goes with sigmoid, greedy and group_limited_greedy (DeepSeek-V2) with softmax");
  if (d.softmax && e.norm_topk)
    c.report("E412", "norm_topk_prob",
             "a softmax over all experts that the chosen ones' weights are divided by is not known",
             {"transformers does not read this key of DeepSeek-V2, DeepSeek's own code does"},
             "norm_topk_prob is false in published models");
  if (c.integer("moe_layer_freq", 1, 1, c.max_layers) != 1)
    c.report("E412", "moe_layer_freq", "dense layers between MoE layers are not known", {}, "moe_layer_freq must be 1");
  if (e.experts > 0 && e.first_dense_layers < m.layers) m.moe = e;
}

void write_deepseek_experts(const ModelSpec& m, nlohmann::json& c) {
  if (!m.moe) {
    c["first_k_dense_replace"] = m.layers;
    return;
  }
  const MoeSpec& e = *m.moe;
  write_balance(e, c);
  c["moe_intermediate_size"] = e.expert_intermediate;
  c["norm_topk_prob"] = e.norm_topk;
  c["n_routed_experts"] = e.experts;
  c["n_shared_experts"] = e.shared_experts;
  c["first_k_dense_replace"] = e.first_dense_layers;
  c["n_group"] = e.groups;
  c["topk_group"] = e.topk_groups;
  c["routed_scaling_factor"] = e.routed_scaling;
}

}  // namespace hotbunk
