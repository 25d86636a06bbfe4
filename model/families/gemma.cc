// Gemma-2 and 3: norms on both sides of attention and MLP, GELU, capped scores and logits (2), a base of their own for
// layers with the window (3).
#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr LlamaConfig gemma2_config = {.max_position = 8192,
                                       .tie_embeddings = true,
                                       .head_dim = 256,
                                       .geglu = true,
                                       .windows = {.any = true, .by_layer = true, .period = 2}};
constexpr LlamaConfig gemma3_config = {
    .max_position = 131072,
    .tie_embeddings = true,
    .head_dim = 256,
    .qk_norm = true,
    .geglu = true,
    .windows = {.any = true, .by_layer = true, .period = 6, .period_key = "sliding_window_pattern"},
    .rotation = {.theta = 1e6, .by_layer_type = true}};
constexpr std::string_view gemma_keys[] = {
    "hidden_activation",           "query_pre_attn_scalar",  "attn_logit_softcapping", "final_logit_softcapping",
    "use_bidirectional_attention", "sliding_window_pattern", "rope_local_base_freq"};

/// What scores and logits are capped at where the config says nothing; 0: not.
struct GemmaCaps {
  double scores = 0.0, logits = 0.0;
};

void read_gemma(ConfigReader& c, const LlamaConfig& config, const GemmaCaps& caps, ModelSpec& m) {
  read_llama_config(c, config, m);
  m.output_norms = m.scaled_embedding = true;
  m.norm_offset = 1.0;
  m.query_scalar = c.real("query_pre_attn_scalar", 256.0, 1e-6, 1e12);
  const auto cap = [&](const char* key, double otherwise) {
    return c.names(key) && c.find(key) == nullptr ? 0.0 : c.real(key, otherwise, 1e-3, 1e12);
  };
  m.attention_softcap = cap("attn_logit_softcapping", caps.scores);
  m.logit_softcap = cap("final_logit_softcapping", caps.logits);
  if (c.boolean("use_bidirectional_attention", false))
    c.report("E412", "use_bidirectional_attention", "attention to later tokens is not known");
}

void write_gemma(const ModelSpec& m, const LlamaConfig& config, nlohmann::json& c) {
  using nlohmann::json;
  write_llama_config(m, config, c);
  const auto cap = [](double at) { return at > 0.0 ? json(at) : json(nullptr); };
  const auto whole = static_cast<std::int64_t>(m.query_scalar);  // what transformers expects there
  c["query_pre_attn_scalar"] = static_cast<double>(whole) == m.query_scalar ? json(whole) : json(m.query_scalar);
  c["attn_logit_softcapping"] = cap(m.attention_softcap);
  c["final_logit_softcapping"] = cap(m.logit_softcap);
}

void put_gemma_layer(const LayerParameters& p) {
  const std::int64_t hidden = p.model().hidden;
  put_attention(p);
  put_mlp(p);
  p.put("input_layernorm.weight", {hidden}, R::input_norm);
  p.put("post_attention_layernorm.weight", {hidden}, R::attention_out_norm);
  p.put("pre_feedforward_layernorm.weight", {hidden}, R::post_norm);
  p.put("post_feedforward_layernorm.weight", {hidden}, R::mlp_out_norm);
}

}  // namespace

extern const FamilySpec gemma2_family = {
    .class_name = "Gemma2ForCausalLM",
    .model_type = "gemma2",
    .keys = gemma_keys,
    .read =
        [](ConfigReader& c, ModelSpec& m) {
          read_gemma(c, gemma2_config, {50.0, 30.0}, m);
        },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_gemma(m, gemma2_config, c); },
    .layer = put_gemma_layer};

extern const FamilySpec gemma3_family = {
    .class_name = "Gemma3ForCausalLM",
    .model_type = "gemma3_text",
    .keys = gemma_keys,
    .read = [](ConfigReader& c, ModelSpec& m) { read_gemma(c, gemma3_config, {}, m); },
    .write = [](const ModelSpec& m, nlohmann::json& c) { write_gemma(m, gemma3_config, c); },
    .layer = put_gemma_layer};

}  // namespace hotbunk
