// Mixtral: Mistral with experts.
#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig mixtral_config = {.max_position = 131072,
                                        .norm_eps = 1e-5,
                                        .writes_attention_bias = false,
                                        .windows = {.any = true, .absent = 0},
                                        .rotation = {.theta = 1e6}};
constexpr std::string_view mixtral_keys[] = {"num_local_experts", "num_experts_per_tok", "output_router_logits",
                                             "router_aux_loss_coef", "router_jitter_noise"};

void read_mixtral(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, mixtral_config, m);
  MoeSpec e;
  e.experts = c.integer("num_local_experts", 8, 1, c.max_experts);
  e.experts_per_token = c.integer("num_experts_per_tok", 2, 1, c.max_experts);
  e.expert_intermediate = m.intermediate;
  e.router_jitter = c.real("router_jitter_noise", 0.0, 0.0, 1.0);
  read_balance(c, e);
  m.moe = e;
}

void write_mixtral(const ModelSpec& m, nlohmann::json& c) {
  write_llama_config(m, mixtral_config, c);
  write_balance(*m.moe, c);
  c["num_local_experts"] = m.moe->experts;
  if (m.moe->router_jitter > 0.0) c["router_jitter_noise"] = m.moe->router_jitter;
}

void put_mixtral_layer(const LayerParameters& p) {
  put_attention(p);
  if (p.model().is_moe_layer(p.layer()))
    put_experts(p, {.block = "block_sparse_moe.", .gate = "w1", .up = "w3", .down = "w2"});
  else put_mlp(p);
  put_norms(p);
}

/// Source: PEFT's names, those of the modules of each expert.
using R = ParamRole;
constexpr LoraTarget mixtral_adapters[] = {
    {"q_proj", R::q_proj, R::q_lora_a, R::q_lora_b},
    {"k_proj", R::k_proj, R::k_lora_a, R::k_lora_b},
    {"v_proj", R::v_proj, R::v_lora_a, R::v_lora_b},
    {"o_proj", R::o_proj, R::o_lora_a, R::o_lora_b},
    {"w1", R::expert_gate, R::expert_gate_lora_a, R::expert_gate_lora_b, "experts.w1"},
    {"w3", R::expert_up, R::expert_up_lora_a, R::expert_up_lora_b, "experts.w3"},
    {"w2", R::expert_down, R::expert_down_lora_a, R::expert_down_lora_b, "experts.w2"}};

}  // namespace

extern const FamilySpec mixtral_family = {.class_name = "MixtralForCausalLM",
                                          .model_type = "mixtral",
                                          .keys = mixtral_keys,
                                          .read = read_mixtral,
                                          .write = write_mixtral,
                                          .layer = put_mixtral_layer,
                                          .adapters = mixtral_adapters};

}  // namespace hotbunk
