// Qwen3.5: of four layers three have linear attention (LinearAttentionSpec), unless layer_types or
// full_attention_interval say otherwise; the others' output has a gate. The vision tower of the published models is not
// read, nor the layer that predicts a second token.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr LlamaConfig qwen3_5_config = {
    .max_position = 32768, .head_dim = 256, .qk_norm = true, .rotation = {.part = 0.25}};
constexpr std::string_view qwen3_5_keys[] = {
    "partial_rotary_factor",  "attn_output_gate",       "full_attention_interval",
    "linear_conv_kernel_dim", "linear_key_head_dim",    "linear_value_head_dim",
    "linear_num_key_heads",   "linear_num_value_heads", "mamba_ssm_dtype"};

void read_qwen3_5(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, qwen3_5_config, m);
  read_partial_rotation(c, qwen3_5_config.rotation, m);
  m.norm_offset = 1.0;
  m.gated_attention = c.boolean("attn_output_gate", true);
  LinearAttentionSpec a;
  a.key_heads = c.integer("linear_num_key_heads", 16, 1, c.max_heads);
  a.value_heads = c.integer("linear_num_value_heads", 32, 1, c.max_heads);
  a.key_dim = c.integer("linear_key_head_dim", 128, 1, c.max_width);
  a.value_dim = c.integer("linear_value_head_dim", 128, 1, c.max_width);
  a.kernel = c.integer("linear_conv_kernel_dim", 4, 1, c.max_width);
  if (a.value_heads % a.key_heads != 0)
    c.report("E413", "linear_num_value_heads", "value heads of linear attention are no multiple of its key heads",
             {fmt::format("{} % {} = {}", a.value_heads, a.key_heads, a.value_heads % a.key_heads)});
  const std::int64_t interval = c.integer("full_attention_interval", 4, 1, c.max_layers);
  for (std::int64_t layer = 0; layer < m.layers; ++layer) a.layers.push_back((layer + 1) % interval != 0);
  if (auto said = c.layer_types(m.layers, "linear_attention", "full_attention")) a.layers = std::move(*said);
  if (std::ranges::count(a.layers, true) > 0) m.linear = std::move(a);
}

void write_qwen3_5(const ModelSpec& m, nlohmann::json& c) {
  write_llama_config(m, qwen3_5_config, c);
  const LinearAttentionSpec a = m.linear.value_or(LinearAttentionSpec{});
  nlohmann::json types = nlohmann::json::array();
  for (int layer = 0; layer < m.layers; ++layer)
    types.push_back(m.is_linear_layer(layer) ? "linear_attention" : "full_attention");
  c["layer_types"] = std::move(types);
  c["linear_num_key_heads"] = a.key_heads, c["linear_num_value_heads"] = a.value_heads;
  c["linear_key_head_dim"] = a.key_dim, c["linear_value_head_dim"] = a.value_dim;
  c["linear_conv_kernel_dim"] = a.kernel;
  c["attn_output_gate"] = m.gated_attention;
}

/// The convolution has one filter for each channel: (channels, kernel) here, (channels, 1, kernel) in files.
void put_linear_attention(const LayerParameters& p) {
  const LinearAttentionSpec& a = *p.model().linear;
  const std::int64_t hidden = p.model().hidden;
  p.put("linear_attn.in_proj_qkv.weight", {a.convolved(), hidden}, R::linear_qkv);
  p.put("linear_attn.in_proj_z.weight", {a.values(), hidden}, R::linear_gate);
  p.put("linear_attn.in_proj_b.weight", {a.value_heads, hidden}, R::linear_write);
  p.put("linear_attn.in_proj_a.weight", {a.value_heads, hidden}, R::linear_decay);
  p.put("linear_attn.conv1d.weight", {a.convolved(), a.kernel}, R::linear_conv);
  p.put("linear_attn.dt_bias", {a.value_heads}, R::linear_offset);
  p.put("linear_attn.A_log", {a.value_heads}, R::linear_rate);
  p.put("linear_attn.norm.weight", {a.value_dim}, R::linear_norm);
  p.put("linear_attn.out_proj.weight", {hidden, a.values()}, R::linear_out);
}

void put_qwen3_5_layer(const LayerParameters& p) {
  if (p.model().is_linear_layer(p.layer())) put_linear_attention(p);
  else put_attention(p);
  put_mlp(p);
  put_norms(p);
}

}  // namespace

extern const FamilySpec qwen3_5_family = {.class_name = "Qwen3_5ForCausalLM",
                                          .model_type = "qwen3_5_text",
                                          .model_type_around = "qwen3_5",
                                          .keys = qwen3_5_keys,
                                          .read = read_qwen3_5,
                                          .write = write_qwen3_5,
                                          .layer = put_qwen3_5_layer,
                                          .no_adapters = "linear attention has other projections than q, k, v and o"};

}  // namespace hotbunk
