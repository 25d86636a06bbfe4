// DeepSeek-V2 and V3: latent attention; experts in groups, behind dense layers.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "model/families/deepseek_experts.h"
#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr LlamaConfig deepseek_config = {.latent = true};
constexpr std::string_view deepseek_keys[] = {"q_lora_rank",      "kv_lora_rank", "qk_nope_head_dim",
                                              "qk_rope_head_dim", "v_head_dim",   "rope_interleave"};

void read_deepseek(ConfigReader& c, const DeepseekExperts& experts, ModelSpec& m) {
  LlamaConfig config = deepseek_config;
  if (!experts.softmax) config.max_position = 4096;  // V3
  read_llama_config(c, config, m);
  MlaSpec a;
  a.q_lora_rank = c.integer("q_lora_rank", 0, 0, c.max_width);
  a.kv_lora_rank = c.integer("kv_lora_rank", 512, 1, c.max_width);
  a.qk_nope_head_dim = c.integer("qk_nope_head_dim", 128, 1, c.max_width);
  a.qk_rope_head_dim = c.integer("qk_rope_head_dim", 64, 1, c.max_width);
  a.v_head_dim = c.integer("v_head_dim", 128, 1, c.max_width);
  if (a.qk_rope_head_dim % 2 != 0)
    c.report("E413", "qk_rope_head_dim",
             fmt::format("qk_rope_head_dim {} is odd; rotary embedding turns pairs", a.qk_rope_head_dim));
  m.head_dim = a.qk_nope_head_dim + a.qk_rope_head_dim;
  m.kv_heads = m.heads;  // each query head has a key and a value of its own, made of the latent
  m.mla = a;
  if (m.qkv_bias)
    c.report("E412", "attention_bias", "latent attention with biases is not known", {},
             "no published model of this family has them");
  if (!c.boolean("rope_interleave", true))
    c.report("E412", "rope_interleave", "latent attention that turns halves of the rotary part is not known", {},
             "neighbours turn together in published models of this family");
  read_deepseek_experts(c, experts, m);
}

void write_deepseek(const ModelSpec& m, bool v2, nlohmann::json& c) {
  write_llama_config(m, deepseek_config, c);
  c["q_lora_rank"] = m.mla->q_lora_rank > 0 ? nlohmann::json(m.mla->q_lora_rank) : nlohmann::json(nullptr);
  c["kv_lora_rank"] = m.mla->kv_lora_rank;
  c["qk_nope_head_dim"] = m.mla->qk_nope_head_dim;
  c["qk_rope_head_dim"] = m.mla->qk_rope_head_dim;
  c["v_head_dim"] = m.mla->v_head_dim;
  write_deepseek_experts(m, c);
  if (!m.moe) return;
  c["scoring_func"] = m.moe->sigmoid_scores ? "sigmoid" : "softmax";
  c["topk_method"] = m.moe->router_bias ? "noaux_tc" : v2 && m.moe->groups == 1 ? "greedy" : "group_limited_greedy";
}

void put_deepseek_layer(const LayerParameters& p) {
  const ModelSpec& m = p.model();
  const MlaSpec& a = *m.mla;
  const std::int64_t q_rows = m.heads * (a.qk_nope_head_dim + a.qk_rope_head_dim);
  if (a.q_lora_rank > 0) {
    p.put("self_attn.q_a_proj.weight", {a.q_lora_rank, m.hidden}, R::q_a_proj);
    p.put("self_attn.q_a_layernorm.weight", {a.q_lora_rank}, R::q_a_norm);
    p.put("self_attn.q_b_proj.weight", {q_rows, a.q_lora_rank}, R::q_b_proj);
  } else {
    p.put("self_attn.q_proj.weight", {q_rows, m.hidden}, R::q_proj);
  }
  p.put("self_attn.kv_a_proj_with_mqa.weight", {a.kept_dim(), m.hidden}, R::kv_a_proj);
  p.put("self_attn.kv_a_layernorm.weight", {a.kv_lora_rank}, R::kv_a_norm);
  p.put("self_attn.kv_b_proj.weight", {m.heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank}, R::kv_b_proj);
  p.put("self_attn.o_proj.weight", {m.hidden, m.heads * a.v_head_dim}, R::o_proj);
  if (m.is_moe_layer(p.layer())) put_experts(p);
  else put_mlp(p);
  put_norms(p);
}

/// Source: PEFT's names, those of transformers' modules, experts' as each expert is one: one name is of dense layers'
/// MLPs, of each expert's, and of those that every token takes.
constexpr LoraTarget deepseek_adapters[] = {
    {"q_proj", R::q_proj, R::q_lora_a, R::q_lora_b},
    {"q_a_proj", R::q_a_proj, R::q_a_lora_a, R::q_a_lora_b},
    {"q_b_proj", R::q_b_proj, R::q_b_lora_a, R::q_b_lora_b},
    {"kv_a_proj_with_mqa", R::kv_a_proj, R::kv_a_lora_a, R::kv_a_lora_b},
    {"kv_b_proj", R::kv_b_proj, R::kv_b_lora_a, R::kv_b_lora_b},
    {"o_proj", R::o_proj, R::o_lora_a, R::o_lora_b},
    {"gate_proj", R::gate_proj, R::gate_lora_a, R::gate_lora_b},
    {"up_proj", R::up_proj, R::up_lora_a, R::up_lora_b},
    {"down_proj", R::down_proj, R::down_lora_a, R::down_lora_b},
    {"gate_proj", R::shared_gate, R::shared_gate_lora_a, R::shared_gate_lora_b, "shared_experts.gate_proj"},
    {"up_proj", R::shared_up, R::shared_up_lora_a, R::shared_up_lora_b, "shared_experts.up_proj"},
    {"down_proj", R::shared_down, R::shared_down_lora_a, R::shared_down_lora_b, "shared_experts.down_proj"},
    {"gate_proj", R::expert_gate, R::expert_gate_lora_a, R::expert_gate_lora_b, "experts.gate_proj"},
    {"up_proj", R::expert_up, R::expert_up_lora_a, R::expert_up_lora_b, "experts.up_proj"},
    {"down_proj", R::expert_down, R::expert_down_lora_a, R::expert_down_lora_b, "experts.down_proj"}};

}  // namespace

extern const FamilySpec deepseek_v2_family = {
    .class_name = "DeepseekV2ForCausalLM",
    .model_type = "deepseek_v2",
    .keys = deepseek_keys,
    .keys_of_parts = deepseek_expert_keys,
    .read = [](ConfigReader& c, ModelSpec& m) { read_deepseek(c, {.softmax = true}, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_deepseek(m, true, c); },
    .layer = put_deepseek_layer,
    .adapters = deepseek_adapters};

extern const FamilySpec deepseek_v3_family = {
    .class_name = "DeepseekV3ForCausalLM",
    .model_type = "deepseek_v3",
    .keys = deepseek_keys,
    .keys_of_parts = deepseek_expert_keys,
    .read = [](ConfigReader& c, ModelSpec& m) { read_deepseek(c, {}, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_deepseek(m, false, c); },
    .layer = put_deepseek_layer,
    .adapters = deepseek_adapters};

}  // namespace hotbunk
