#include <nlohmann/json.hpp>

#include "base/json.h"
#include "spec/architectures.h"
#include "spec/model_config.h"

namespace hotbunk {
namespace {

using nlohmann::json;

std::string_view torch_name(DType t) {
  return t == DType::bf16 ? "bfloat16" : t == DType::f16 ? "float16" : t == DType::f64 ? "float64" : "float32";
}

json gpt2_config(const ModelSpec& m) {
  return {{"n_embd", m.hidden},
          {"n_layer", m.layers},
          {"n_head", m.heads},
          {"n_positions", m.max_position},
          {"n_inner", m.intermediate},
          {"layer_norm_epsilon", m.norm_eps},
          {"activation_function", "gelu_new"}};
}

void add_moe(json& c, const ModelSpec& m) {
  const MoeSpec& e = *m.moe;
  c["num_experts_per_tok"] = e.experts_per_token;
  if (e.balance_loss > 0.0) c["output_router_logits"] = true, c["router_aux_loss_coef"] = e.balance_loss;
  if (m.family == ModelFamily::gpt_oss) {
    c["num_local_experts"] = e.experts;
    c["swiglu_limit"] = e.swiglu_limit;
    c["swiglu_alpha"] = e.swiglu_alpha;
    return;
  }
  if (m.family == ModelFamily::mixtral) {
    c["num_local_experts"] = e.experts;
    if (e.router_jitter > 0.0) c["router_jitter_noise"] = e.router_jitter;
    return;
  }
  c["moe_intermediate_size"] = e.expert_intermediate;
  c["norm_topk_prob"] = e.norm_topk;
  if (m.family == ModelFamily::qwen3_moe) {
    c["num_experts"] = e.experts;
    return;
  }
  const bool v2 = m.family == ModelFamily::deepseek_v2;
  c["n_routed_experts"] = e.experts;
  c["n_shared_experts"] = e.shared_experts;
  c["first_k_dense_replace"] = e.first_dense_layers;
  c["n_group"] = e.groups;
  c["topk_group"] = e.topk_groups;
  c["routed_scaling_factor"] = e.routed_scaling;
  if (m.family == ModelFamily::glm4_moe) return;
  c["scoring_func"] = e.sigmoid_scores ? "sigmoid" : "softmax";
  c["topk_method"] = e.router_bias ? "noaux_tc" : v2 && e.groups == 1 ? "greedy" : "group_limited_greedy";
}

json full_rope_config(const ModelSpec& m) {
  json rope = {{"rope_type", "default"}, {"rope_theta", m.rope_theta}};
  if (m.family == ModelFamily::glm4_moe || m.family == ModelFamily::qwen3_5)
    rope["partial_rotary_factor"] =
        m.rotary_dim > 0 ? static_cast<double>(m.rotary_dim) / static_cast<double>(m.head_dim) : 1.0;
  if (!m.rope_scaling) return rope;
  rope["rope_type"] = m.rope_scaling->type;
  rope["factor"] = m.rope_scaling->factor;
  rope["original_max_position_embeddings"] = m.rope_scaling->original_max_position;
  if (m.rope_scaling->type == "llama3") {
    rope["low_freq_factor"] = m.rope_scaling->low_freq_factor;
    rope["high_freq_factor"] = m.rope_scaling->high_freq_factor;
  }
  if (m.rope_scaling->type == "yarn") {
    rope["beta_fast"] = m.rope_scaling->beta_fast;
    rope["beta_slow"] = m.rope_scaling->beta_slow;
    rope["truncate"] = m.rope_scaling->truncate;
    rope["attention_factor"] = m.rope_scaling->attention_factor;
    if (m.rope_scaling->mscale_all_dim > 0.0) rope["mscale_all_dim"] = m.rope_scaling->mscale_all_dim;
  }
  return rope;
}

json rope_config(const ModelSpec& m) {
  json rope = full_rope_config(m);
  if (m.family != ModelFamily::gemma3) return rope;
  return {{"full_attention", std::move(rope)},
          {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", m.window_rope_theta}}}};
}

void add_window(json& c, const ModelSpec& m) {
  c["sliding_window"] = m.sliding_window, c["use_sliding_window"] = true;
  json types = json::array();
  for (std::int64_t layer = 0; layer < m.layers; ++layer)
    types.push_back(!m.full_layers.empty() && m.full_layers[static_cast<std::size_t>(layer)] ? "full_attention"
                                                                                             : "sliding_attention");
  if (has_layer_types(m.family)) c["layer_types"] = std::move(types);
}

void add_gemma(json& c, const ModelSpec& m) {
  const auto cap = [](double at) { return at > 0.0 ? json(at) : json(nullptr); };
  c.erase("hidden_act");
  c["hidden_activation"] = "gelu_pytorch_tanh";
  const auto whole = static_cast<std::int64_t>(m.query_scalar);  // what transformers expects there
  c["query_pre_attn_scalar"] = static_cast<double>(whole) == m.query_scalar ? json(whole) : json(m.query_scalar);
  c["attn_logit_softcapping"] = cap(m.attention_softcap);
  c["final_logit_softcapping"] = cap(m.logit_softcap);
}

void add_linear_attention(json& c, const ModelSpec& m) {
  const LinearAttentionSpec a = m.linear.value_or(LinearAttentionSpec{});
  json types = json::array();
  for (int layer = 0; layer < m.layers; ++layer)
    types.push_back(m.is_linear_layer(layer) ? "linear_attention" : "full_attention");
  c["layer_types"] = std::move(types);
  c["linear_num_key_heads"] = a.key_heads, c["linear_num_value_heads"] = a.value_heads;
  c["linear_key_head_dim"] = a.key_dim, c["linear_value_head_dim"] = a.value_dim;
  c["linear_conv_kernel_dim"] = a.kernel;
  c["attn_output_gate"] = m.gated_attention;
}

json llama_config(const ModelSpec& m) {
  json c = {{"hidden_size", m.hidden},
            {"intermediate_size", m.intermediate},
            {"num_hidden_layers", m.layers},
            {"num_attention_heads", m.heads},
            {"num_key_value_heads", m.kv_heads},
            {"max_position_embeddings", m.max_position},
            {"rms_norm_eps", m.norm_eps},
            {"rope_parameters", rope_config(m)},
            {"hidden_act", "silu"}};
  if (!m.mla) c["head_dim"] = m.head_dim;
  if (m.family != ModelFamily::qwen2 && m.family != ModelFamily::mistral && m.family != ModelFamily::mixtral)
    c["attention_bias"] = m.qkv_bias;
  if (m.sliding_window > 0) add_window(c, m);
  else if (m.family == ModelFamily::mistral || m.family == ModelFamily::gpt_oss || is_gemma(m.family))
    c["sliding_window"] = nullptr;
  if (is_gemma(m.family)) add_gemma(c, m);
  if (m.family == ModelFamily::glm4_moe) c["use_qk_norm"] = m.qk_norm;
  if (m.family == ModelFamily::qwen3_5) add_linear_attention(c, m);
  if (m.mla) {
    c["q_lora_rank"] = m.mla->q_lora_rank > 0 ? json(m.mla->q_lora_rank) : json(nullptr);
    c["kv_lora_rank"] = m.mla->kv_lora_rank;
    c["qk_nope_head_dim"] = m.mla->qk_nope_head_dim;
    c["qk_rope_head_dim"] = m.mla->qk_rope_head_dim;
    c["v_head_dim"] = m.mla->v_head_dim;
  }
  if (m.moe) add_moe(c, m);
  // transformers' own default has experts from the fourth layer (V3), the first one (V2) or the second (GLM) on.
  else if (m.mla || m.family == ModelFamily::glm4_moe) c["first_k_dense_replace"] = m.layers;
  return c;
}

}  // namespace

json config_of(const ModelSpec& m, DType dtype) {
  json c = m.family == ModelFamily::gpt2 ? gpt2_config(m) : llama_config(m);
  const Architecture& written = architecture_of(m.family);
  c["architectures"] = {written.class_name};
  c["model_type"] = written.model_type;
  c["vocab_size"] = m.vocab;
  c["tie_word_embeddings"] = m.tie_embeddings;
  c["initializer_range"] = m.init_range;
  c["dtype"] = torch_name(dtype);
  c["bos_token_id"] = m.bos_token < 0 ? json(nullptr) : json(m.bos_token);
  c["eos_token_id"] = m.eos_token < 0 ? json(nullptr) : json(m.eos_token);
  return c;
}

std::string config_text(const ModelSpec& m, DType dtype) { return json_text(config_of(m, dtype), 2) + "\n"; }

}  // namespace hotbunk
