// GLM-4.5: experts as DeepSeek-V3 has them; of queries and keys a part turns.
#include <nlohmann/json.hpp>

#include "model/families/deepseek_experts.h"
#include "model/families/parts.h"

namespace hotbunk {
namespace {

constexpr LlamaConfig glm4_moe_config = {
    .max_position = 131072, .norm_eps = 1e-5, .o_bias = false, .asks_qk_norm = true, .rotation = {.part = 0.5}};
constexpr std::string_view glm4_moe_keys[] = {"partial_rotary_factor", "use_qk_norm"};

void read_glm4_moe(ConfigReader& c, ModelSpec& m) {
  read_llama_config(c, glm4_moe_config, m);
  read_partial_rotation(c, glm4_moe_config.rotation, m);
  read_deepseek_experts(c, {.experts = 128, .experts_per_token = 8, .width = 1408, .shared = 1, .first_dense = 1}, m);
}

void write_glm4_moe(const ModelSpec& m, nlohmann::json& c) {
  write_llama_config(m, glm4_moe_config, c);
  write_deepseek_experts(m, c);
}

/// As DeepSeek's, of attention those of most families.
using R = ParamRole;
constexpr LoraTarget glm4_moe_adapters[] = {
    {"q_proj", R::q_proj, R::q_lora_a, R::q_lora_b},
    {"k_proj", R::k_proj, R::k_lora_a, R::k_lora_b},
    {"v_proj", R::v_proj, R::v_lora_a, R::v_lora_b},
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

extern const FamilySpec glm4_moe_family = {.class_name = "Glm4MoeForCausalLM",
                                           .model_type = "glm4_moe",
                                           .keys = glm4_moe_keys,
                                           .keys_of_parts = deepseek_expert_keys,
                                           .read = read_glm4_moe,
                                           .write = write_glm4_moe,
                                           .layer = put_llama_layer,
                                           .adapters = glm4_moe_adapters};

}  // namespace hotbunk
