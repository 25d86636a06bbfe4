// Qwen3 with experts in every layer.
#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig qwen3_moe_config = {
    .max_position = 32768, .head_dim = 128, .qk_norm = true, .windows = {.any = true, .if_used = true}};
constexpr std::string_view qwen3_moe_keys[] = {"num_local_experts",     "num_experts",         "num_experts_per_tok",
                                               "moe_intermediate_size", "norm_topk_prob",      "output_router_logits",
                                               "router_aux_loss_coef",  "decoder_sparse_step", "mlp_only_layers"};

void read_qwen3_moe(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, qwen3_moe_config, m);
  MoeSpec e;
  e.experts =
      c.integer(c.find("num_local_experts") != nullptr ? "num_local_experts" : "num_experts", 128, 1, c.max_experts);
  e.experts_per_token = c.integer("num_experts_per_tok", 8, 1, c.max_experts);
  e.expert_intermediate = c.integer("moe_intermediate_size", 768, 1, c.max_width);
  e.norm_topk = c.boolean("norm_topk_prob", false);
  read_balance(c, e);
  const nlohmann::json* const dense = c.find("mlp_only_layers");
  if (c.integer("decoder_sparse_step", 1, 1, c.max_layers) != 1 ||
      (dense != nullptr && !(dense->is_array() && dense->empty())))
    c.report("E412", "decoder_sparse_step", "dense layers between MoE layers are not known", {},
             "decoder_sparse_step must be 1 and mlp_only_layers empty");
  m.moe = e;
}

void write_qwen3_moe(const ModelSpec& m, nlohmann::json& c) {
  write_llama_config(m, qwen3_moe_config, c);
  write_balance(*m.moe, c);
  c["num_experts"] = m.moe->experts;
  c["moe_intermediate_size"] = m.moe->expert_intermediate;
  c["norm_topk_prob"] = m.moe->norm_topk;
}

/// Source: PEFT's names, those of the modules of each expert.
using R = ParamRole;
constexpr LoraTarget qwen3_moe_adapters[] = {
    {"q_proj", R::q_proj, R::q_lora_a, R::q_lora_b},
    {"k_proj", R::k_proj, R::k_lora_a, R::k_lora_b},
    {"v_proj", R::v_proj, R::v_lora_a, R::v_lora_b},
    {"o_proj", R::o_proj, R::o_lora_a, R::o_lora_b},
    {"gate_proj", R::expert_gate, R::expert_gate_lora_a, R::expert_gate_lora_b, "experts.gate_proj"},
    {"up_proj", R::expert_up, R::expert_up_lora_a, R::expert_up_lora_b, "experts.up_proj"},
    {"down_proj", R::expert_down, R::expert_down_lora_a, R::expert_down_lora_b, "experts.down_proj"}};

}  // namespace

extern const FamilySpec qwen3_moe_family = {.class_name = "Qwen3MoeForCausalLM",
                                            .model_type = "qwen3_moe",
                                            .keys = qwen3_moe_keys,
                                            .read = read_qwen3_moe,
                                            .write = write_qwen3_moe,
                                            .layer = put_llama_layer,
                                            .adapters = qwen3_moe_adapters};

}  // namespace hotbunk
