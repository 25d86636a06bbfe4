// GPT-2: learned positions, LayerNorm, an MLP without a gate, biases everywhere.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr std::string_view gpt2_keys[] = {"n_embd",
                                          "n_layer",
                                          "n_head",
                                          "n_positions",
                                          "n_inner",
                                          "layer_norm_epsilon",
                                          "activation_function",
                                          "scale_attn_weights",
                                          "scale_attn_by_inverse_layer_idx",
                                          "add_cross_attention"};

void read_gpt2(ConfigReader& c, ModelSpec& m) {
  m.hidden = c.integer("n_embd", 768, 1, c.max_width);
  m.layers = c.integer("n_layer", 12, 1, c.max_layers);
  m.heads = c.integer("n_head", 12, 1, c.max_heads);
  m.vocab = c.integer("vocab_size", 50257, 1, c.max_vocab);
  m.max_position = c.integer("n_positions", 1024, 1, c.max_tokens);
  m.intermediate = c.integer("n_inner", 4 * m.hidden, 1, 4 * c.max_width);
  m.norm_eps = c.real("layer_norm_epsilon", 1e-5, c.least_eps, 1.0);
  m.tie_embeddings = c.boolean("tie_word_embeddings", true);
  m.kv_heads = m.heads;
  m.head_dim = std::max<std::int64_t>(1, m.hidden / m.heads);
  m.qkv_bias = m.o_bias = m.mlp_bias = true;
  m.gated_mlp = false;
  m.learned_positions = m.layer_norm = true;
  const std::string activation = c.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")  // one function by two names
    c.report("E412", "activation_function",
             fmt::format("activation \"{}\" is not known for this architecture", activation.substr(0, 50)), {},
             "the MLP of this family uses gelu_new");
  if (!c.boolean("scale_attn_weights", true))
    c.report("E412", "scale_attn_weights", "attention without the scale of 1/sqrt(head_dim) is not known");
  if (c.boolean("scale_attn_by_inverse_layer_idx", false))
    c.report("E412", "scale_attn_by_inverse_layer_idx", "attention scaled by the layer's number is not known");
  if (c.boolean("add_cross_attention", false))
    c.report("E412", "add_cross_attention", "attention to an encoder is not known");
  if (m.hidden % m.heads != 0)
    c.report("E413", "n_head", "hidden size is no multiple of the attention heads",
             {fmt::format("n_embd {} % n_head {} = {}", m.hidden, m.heads, m.hidden % m.heads)});
}

void write_gpt2(const ModelSpec& m, nlohmann::json& c) {
  c.update({{"n_embd", m.hidden},
            {"n_layer", m.layers},
            {"n_head", m.heads},
            {"n_positions", m.max_position},
            {"n_inner", m.intermediate},
            {"layer_norm_epsilon", m.norm_eps},
            {"activation_function", "gelu_new"}});
}

/// Files hold q, k and v packed in `c_attn` (and every matrix transposed, Conv1D); here they are three (out, in)
/// parameters, because layouts split them by heads.
void put_gpt2_layer(const LayerParameters& p) {
  const ModelSpec& m = p.model();
  p.put("ln_1.weight", {m.hidden}, R::input_norm);
  p.put("ln_1.bias", {m.hidden}, R::input_norm_bias);
  p.linear("attn.c_attn.q", m.q_rows(), m.hidden, R::q_proj, m.qkv_bias, R::q_bias);
  p.linear("attn.c_attn.k", m.kv_rows(), m.hidden, R::k_proj, m.qkv_bias, R::k_bias);
  p.linear("attn.c_attn.v", m.kv_rows(), m.hidden, R::v_proj, m.qkv_bias, R::v_bias);
  p.linear("attn.c_proj", m.hidden, m.q_rows(), R::o_proj, m.o_bias, R::o_bias);
  p.put("ln_2.weight", {m.hidden}, R::post_norm);
  p.put("ln_2.bias", {m.hidden}, R::post_norm_bias);
  p.linear("mlp.c_fc", m.intermediate, m.hidden, R::up_proj, m.mlp_bias, R::up_bias);
  p.linear("mlp.c_proj", m.hidden, m.intermediate, R::down_proj, m.mlp_bias, R::down_bias);
}

/// c_attn.q, c_attn.k and c_attn.v: which of the three. -1: not packed.
int place_in_pack(ParamRole role) {
  switch (role) {
    case R::q_proj:
    case R::q_bias:
      return 0;
    case R::k_proj:
    case R::k_bias:
      return 1;
    case R::v_proj:
    case R::v_bias:
      return 2;
    default:
      return -1;
  }
}

/// Source: transformers, GPT2Attention and Conv1D.
void store_gpt2(const ModelSpec& model, const ParamSpec& p, StoredParameter& out) {
  if (p.layer < 0) return;
  if (const int place = place_in_pack(p.role); place >= 0) {
    const std::size_t part = p.name.rfind('.') - 2;  // ".q" of c_attn.q.weight
    out.tensor.erase(part, 2);
    out.first = place == 0 ? 0 : model.q_rows() + (place - 1) * model.kv_rows();
    out.shape[0] = model.q_rows() + 2 * model.kv_rows();
  }
  if (p.shape.size() != 2) return;
  std::swap(out.shape[0], out.shape[1]);
  out.row_step = 1, out.col_step = out.shape[1];
}

/// c_proj is two modules of a layer, as PEFT takes names by their ends.
constexpr LoraTarget gpt2_adapters[] = {{"c_attn", R::q_proj, R::q_lora_a, R::q_lora_b, "c_attn"},
                                        {"c_attn", R::k_proj, R::q_lora_a, R::k_lora_b, "c_attn"},
                                        {"c_attn", R::v_proj, R::q_lora_a, R::v_lora_b, "c_attn"},
                                        {"c_proj", R::o_proj, R::o_lora_a, R::o_lora_b, "attn.c_proj"},
                                        {"c_fc", R::up_proj, R::up_lora_a, R::up_lora_b, "c_fc"},
                                        {"c_proj", R::down_proj, R::down_lora_a, R::down_lora_b, "mlp.c_proj"}};

}  // namespace

extern const FamilySpec gpt2_family = {.class_name = "GPT2LMHeadModel",
                                       .model_type = "gpt2",
                                       .keys = gpt2_keys,
                                       .read = read_gpt2,
                                       .write = write_gpt2,
                                       .layer = put_gpt2_layer,
                                       .names = {.embedding = "transformer.wte",
                                                 .positions = "transformer.wpe",
                                                 .final_norm = "transformer.ln_f",
                                                 .layers = "transformer.h"},
                                       .store = store_gpt2,
                                       .adapters = gpt2_adapters};

}  // namespace hotbunk
