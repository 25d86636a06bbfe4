// gpt-oss: experts in every layer; biases everywhere, sinks of attention, clamped gates.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

/// What transformers takes where the config says nothing.
RopeScaling gpt_oss_scaling() {
  RopeScaling out{.type = "yarn", .factor = 32.0, .original_max_position = 4096, .truncate = false};
  out.attention_factor = 0.1 * std::log(out.factor) + 1.0;
  return out;
}

constexpr LlamaConfig gpt_oss_config = {.kv_heads = 8,
                                        .max_position = 131072,
                                        .norm_eps = 1e-5,
                                        .head_dim = 64,
                                        .attention_bias = true,
                                        .windows = {.any = true, .absent = 128, .by_layer = true, .period = 2},
                                        .rotation = {.theta = 150000.0, .scaling = gpt_oss_scaling}};
constexpr std::string_view gpt_oss_keys[] = {"num_local_experts",    "num_experts",          "num_experts_per_tok",
                                             "output_router_logits", "router_aux_loss_coef", "swiglu_limit",
                                             "swiglu_alpha"};

void read_gpt_oss(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, gpt_oss_config, m);
  m.attention_sinks = true;
  MoeSpec e;
  e.experts = c.integer(
      c.find("num_local_experts") == nullptr && c.find("num_experts") != nullptr ? "num_experts" : "num_local_experts",
      128, 1, c.max_experts);
  e.experts_per_token = c.integer("num_experts_per_tok", 4, 1, c.max_experts);
  e.expert_intermediate = m.intermediate;
  e.biases = true;
  e.swiglu_limit = c.real("swiglu_limit", 7.0, 1e-3, 1e6);
  e.swiglu_alpha = c.real("swiglu_alpha", 1.702, 1e-3, 1e3);
  read_balance(c, e);
  m.moe = e;
}

void write_gpt_oss(const ModelSpec& m, nlohmann::json& c) {
  write_llama_config(m, gpt_oss_config, c);
  write_balance(*m.moe, c);
  c["num_local_experts"] = m.moe->experts;
  c["swiglu_limit"] = m.moe->swiglu_limit;
  c["swiglu_alpha"] = m.moe->swiglu_alpha;
}

/// Files hold all experts of a layer in one tensor, gate and up side by side; here each has its own.
void put_gpt_oss_experts(const LayerParameters& p) {
  const ModelSpec& m = p.model();
  const std::int64_t width = m.moe->expert_intermediate;
  p.linear("mlp.router", m.moe->experts, m.hidden, R::router, true, R::router_linear_bias);
  for (int i = 0; i < p.experts(); ++i) {
    const std::string expert = fmt::format("mlp.experts.{}.", i);
    p.put(expert + "gate_proj.weight", {width, m.hidden}, R::expert_gate, i);
    p.put(expert + "up_proj.weight", {width, m.hidden}, R::expert_up, i);
    p.put(expert + "down_proj.weight", {m.hidden, width}, R::expert_down, i);
    p.put(expert + "gate_proj.bias", {width}, R::expert_gate_bias, i);
    p.put(expert + "up_proj.bias", {width}, R::expert_up_bias, i);
    p.put(expert + "down_proj.bias", {m.hidden}, R::expert_down_bias, i);
  }
}

void put_gpt_oss_layer(const LayerParameters& p) {
  put_attention(p);
  if (p.model().is_moe_layer(p.layer())) put_gpt_oss_experts(p);
  else put_mlp(p);
  put_norms(p);
}

/// Of E experts with inner width I: gate_up_proj (E, H, 2 I) and its bias (E, 2 I), gates in even columns; down_proj
/// (E, I, H) and its bias (E, H). Source: transformers, GptOssExperts.
void store_gpt_oss(const ModelSpec& model, const ParamSpec& p, StoredParameter& out) {
  if (p.expert < 0) return;
  const bool up = p.role == R::expert_up || p.role == R::expert_up_bias,
             down = p.role == R::expert_down || p.role == R::expert_down_bias;
  const std::int64_t experts = model.moe->experts, wide = down ? p.shape[0] : 2 * p.shape[0];
  out.tensor = fmt::format("model.layers.{}.mlp.experts.{}", p.layer, down ? "down_proj" : "gate_up_proj");
  if (p.shape.size() == 1) out.tensor += "_bias", out.shape = {experts, wide};
  else out.shape = {experts, p.shape[1], wide};
  out.row_step = down ? 1 : 2, out.col_step = wide;
  out.first = p.expert * wide * (p.shape.size() == 1 ? 1 : p.shape[1]) + (up ? 1 : 0);
}

}  // namespace

extern const FamilySpec gpt_oss_family = {.class_name = "GptOssForCausalLM",
                                          .model_type = "gpt_oss",
                                          .keys = gpt_oss_keys,
                                          .read = read_gpt_oss,
                                          .write = write_gpt_oss,
                                          .layer = put_gpt_oss_layer,
                                          .store = store_gpt_oss};

}  // namespace hotbunk
