// Phi-3 and Phi-4: Llama, whose files hold q, k and v as one tensor and gate and up as one; of some models a part of a
// head turns.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "model/families/parts.h"

namespace hotbunk {
namespace {

using R = ParamRole;

constexpr LlamaConfig phi3_config = {.max_position = 4096,
                                     .norm_eps = 1e-5,
                                     .writes_attention_bias = false,
                                     .windows = {.any = true, .absent = 0},
                                     .rotation = {.part = 1.0}};
constexpr std::string_view phi3_keys[] = {"partial_rotary_factor", "original_max_position_embeddings"};

void read_phi3(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, phi3_config, m);
  read_partial_rotation(c, phi3_config.rotation, m);
  if (c.boolean("attention_bias", false))
    c.report("E412", "attention_bias", "Phi-3's projections have no biases, whatever attention_bias says",
             {"transformers, Phi3Attention: bias=False"}, "set it to false");
  // Phi3Config knows two kinds of positions; "yarn" is another name of the second one there.
  if (!m.rope_scaling) return;
  if (m.rope_scaling->type == "yarn") m.rope_scaling->type = "longrope";
  if (m.rope_scaling->type != "longrope")
    c.report("E412", "rope_scaling", fmt::format("Phi-3 has no positions of rope_type \"{}\"", m.rope_scaling->type),
             {"known: default, longrope"});
}

/// qkv_proj (q + 2 kv, H): queries, then keys, then values; gate_up_proj (2 I, H): gates, then ups. Source:
/// transformers, Phi3Attention and Phi3MLP.
void store_phi3(const ModelSpec& model, const ParamSpec& p, StoredParameter& out) {
  const auto part_of = [&](const char* tensor, std::int64_t row, std::int64_t rows) {
    out.tensor = fmt::format("model.layers.{}.{}.weight", p.layer, tensor);
    out.first = row * p.shape[1];
    out.shape[0] = rows;
  };
  const std::int64_t queries = model.q_rows(), keys = model.kv_rows(), width = model.intermediate;
  if (p.role == R::q_proj) part_of("self_attn.qkv_proj", 0, queries + 2 * keys);
  if (p.role == R::k_proj) part_of("self_attn.qkv_proj", queries, queries + 2 * keys);
  if (p.role == R::v_proj) part_of("self_attn.qkv_proj", queries + keys, queries + 2 * keys);
  if (p.role == R::gate_proj) part_of("mlp.gate_up_proj", 0, 2 * width);
  if (p.role == R::up_proj) part_of("mlp.gate_up_proj", width, 2 * width);
}

}  // namespace

extern const FamilySpec phi3_family = {
    .class_name = "Phi3ForCausalLM",
    .model_type = "phi3",
    .keys = phi3_keys,
    .read = read_phi3,
    .write =
        [](const ModelSpec& m, nlohmann::json& c) {
          write_llama_config(m, phi3_config, c);
          c["pad_token_id"] = nullptr;  // else transformers takes 32000, which a small vocabulary has not
        },
    .layer = put_llama_layer,
    .store = store_phi3,
    .no_adapters =
        "its modules are qkv_proj and gate_up_proj, whose adapters have one A for what are several matrices "
        "here"};

}  // namespace hotbunk
