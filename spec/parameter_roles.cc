#include "spec/parameter_roles.h"

#include <array>
#include <cstddef>

namespace hotbunk {
namespace {

using R = ParamRole;
using Cut = RoleCut;
using enum RoleStart;

constexpr auto by_tokens = RoleGradient::by_tokens, all_of_it = RoleGradient::whole, in_parts = RoleGradient::parts;
constexpr bool matrix = false, vector = true;

// In the order of place_in_unit(). Sources of cuts and gradients: Megatron-LM (column- and row-parallel linears,
// vocab-parallel embedding; finalize_model_grads: layer norms, QK norms and routers).
// clang-format off
constexpr std::array role_rules = {
    RoleRule{R::embedding,          matrix, Cut::vocabulary,    normal, by_tokens, "embedding"},
    RoleRule{R::position_embedding, matrix, Cut::whole,         normal, by_tokens, "position_embedding"},
    RoleRule{R::final_norm,         vector, Cut::whole,         one,    by_tokens, "final_norm"},
    RoleRule{R::final_norm_bias,    vector, Cut::whole,         zero,   by_tokens, "final_norm_bias"},
    RoleRule{R::lm_head,            matrix, Cut::vocabulary,    normal, by_tokens, "lm_head"},
    RoleRule{R::input_norm,         vector, Cut::whole,         one,    by_tokens, "input_norm"},
    RoleRule{R::input_norm_bias,    vector, Cut::whole,         zero,   by_tokens, "input_norm_bias"},
    RoleRule{R::q_a_proj,           matrix, Cut::whole,         normal, in_parts,  "q_a"},
    RoleRule{R::q_a_norm,           vector, Cut::whole,         one,    in_parts,  "q_a_norm"},
    RoleRule{R::q_b_proj,           matrix, Cut::query_rows,    normal, by_tokens, "q_b"},
    RoleRule{R::kv_a_proj,          matrix, Cut::whole,         normal, in_parts,  "kv_a"},
    RoleRule{R::kv_a_norm,          vector, Cut::whole,         one,    in_parts,  "kv_a_norm"},
    RoleRule{R::kv_b_proj,          matrix, Cut::query_rows,    normal, by_tokens, "kv_b"},
    RoleRule{R::q_proj,             matrix, Cut::query_rows,    normal, by_tokens, "qkv"},
    RoleRule{R::k_proj,             matrix, Cut::key_rows,      normal, in_parts},
    RoleRule{R::v_proj,             matrix, Cut::key_rows,      normal, in_parts},
    RoleRule{R::q_bias,             vector, Cut::query_rows,    zero,   by_tokens, "qkv_bias"},
    RoleRule{R::k_bias,             vector, Cut::key_rows,      zero,   in_parts},
    RoleRule{R::v_bias,             vector, Cut::key_rows,      zero,   in_parts},
    RoleRule{R::q_norm,             vector, Cut::whole,         one,    in_parts,  "q_norm"},
    RoleRule{R::k_norm,             vector, Cut::whole,         one,    in_parts,  "k_norm"},
    RoleRule{R::sinks,              vector, Cut::query_rows,    normal, by_tokens, "sinks"},
    RoleRule{R::o_proj,             matrix, Cut::query_columns, normal, by_tokens, "o"},
    RoleRule{R::o_bias,             vector, Cut::whole,         zero,   all_of_it, "o_bias"},
    RoleRule{R::linear_qkv,         matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::linear_gate,        matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::linear_write,       matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::linear_decay,       matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::linear_conv,        matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::linear_offset,      vector, Cut::rows,          one,    by_tokens},
    RoleRule{R::linear_rate,        vector, Cut::rows,          zero,   by_tokens},
    RoleRule{R::linear_norm,        vector, Cut::whole,         one,    in_parts},
    RoleRule{R::linear_out,         matrix, Cut::columns,       normal, by_tokens},
    RoleRule{R::attention_out_norm, vector, Cut::whole,         one,    by_tokens, "attention_out_norm"},
    RoleRule{R::post_norm,          vector, Cut::whole,         one,    by_tokens, "post_norm"},
    RoleRule{R::post_norm_bias,     vector, Cut::whole,         zero,   by_tokens, "post_norm_bias"},
    RoleRule{R::gate_proj,          matrix, Cut::rows,          normal, by_tokens, "gate_up"},
    RoleRule{R::up_proj,            matrix, Cut::rows,          normal, by_tokens, "up"},
    RoleRule{R::up_bias,            vector, Cut::rows,          zero,   by_tokens, "up_bias"},
    RoleRule{R::down_proj,          matrix, Cut::columns,       normal, by_tokens, "down"},
    RoleRule{R::down_bias,          vector, Cut::whole,         zero,   all_of_it, "down_bias"},
    RoleRule{R::mlp_out_norm,       vector, Cut::whole,         one,    by_tokens, "mlp_out_norm"},
    RoleRule{R::router,             matrix, Cut::whole,         normal, in_parts,  "router"},
    RoleRule{R::router_linear_bias, vector, Cut::whole,         normal, in_parts,  "router_linear_bias"},
    RoleRule{R::shared_gate,        matrix, Cut::rows,          normal, by_tokens, "shared_gate_up"},
    RoleRule{R::shared_up,          matrix, Cut::rows,          normal, by_tokens},
    RoleRule{R::shared_down,        matrix, Cut::columns,       normal, by_tokens, "shared_down"},
    // DeepSeek-V3's e_score_correction_bias: pretraining moved it by a rule of its own.
    RoleRule{R::router_bias,        vector, Cut::whole,         zero,   all_of_it, "router_bias", 0, false, true},
    RoleRule{R::expert_gate,        matrix, Cut::rows,          normal, by_tokens, "experts_gate_up", 1},
    RoleRule{R::expert_up,          matrix, Cut::rows,          normal, by_tokens, {}, 1},
    RoleRule{R::expert_down,        matrix, Cut::columns,       normal, by_tokens, "experts_down", 2},
    // What a bias adds to summands, each rank adds in its columns of them.
    RoleRule{R::expert_gate_bias,   vector, Cut::rows,          zero,   by_tokens, "experts_gate_up_bias", 3},
    RoleRule{R::expert_up_bias,     vector, Cut::rows,          zero,   by_tokens, {}, 3},
    RoleRule{R::expert_down_bias,   vector, Cut::rows,          zero,   by_tokens, "experts_down_bias", 4},
    // An adapter's matrix that meets the stream is whole on every rank, the other is cut as the adapted one is.
    RoleRule{R::q_lora_a,           matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::q_lora_b,           matrix, Cut::query_rows,    zero,    in_parts, {}, 0, true},
    RoleRule{R::k_lora_a,           matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::k_lora_b,           matrix, Cut::key_rows,      zero,    in_parts, {}, 0, true},
    RoleRule{R::v_lora_a,           matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::v_lora_b,           matrix, Cut::key_rows,      zero,    in_parts, {}, 0, true},
    RoleRule{R::o_lora_a,           matrix, Cut::query_columns, uniform, in_parts, {}, 0, true},
    RoleRule{R::o_lora_b,           matrix, Cut::whole,         zero,    in_parts, {}, 0, true},
    RoleRule{R::gate_lora_a,        matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::gate_lora_b,        matrix, Cut::rows,          zero,    in_parts, {}, 0, true},
    RoleRule{R::up_lora_a,          matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::up_lora_b,          matrix, Cut::rows,          zero,    in_parts, {}, 0, true},
    RoleRule{R::down_lora_a,        matrix, Cut::columns,       uniform, in_parts, {}, 0, true},
    RoleRule{R::down_lora_b,        matrix, Cut::whole,         zero,    in_parts, {}, 0, true},
    // Every rank makes all of a latent, and finds of its gradients what its heads add.
    RoleRule{R::q_a_lora_a,         matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::q_a_lora_b,         matrix, Cut::whole,         zero,    in_parts, {}, 0, true},
    RoleRule{R::q_b_lora_a,         matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::q_b_lora_b,         matrix, Cut::query_rows,    zero,    in_parts, {}, 0, true},
    RoleRule{R::kv_a_lora_a,        matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::kv_a_lora_b,        matrix, Cut::whole,         zero,    in_parts, {}, 0, true},
    RoleRule{R::kv_b_lora_a,        matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::kv_b_lora_b,        matrix, Cut::query_rows,    zero,    in_parts, {}, 0, true},
    RoleRule{R::shared_gate_lora_a, matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::shared_gate_lora_b, matrix, Cut::rows,          zero,    in_parts, {}, 0, true},
    RoleRule{R::shared_up_lora_a,   matrix, Cut::whole,         uniform, in_parts, {}, 0, true},
    RoleRule{R::shared_up_lora_b,   matrix, Cut::rows,          zero,    in_parts, {}, 0, true},
    RoleRule{R::shared_down_lora_a, matrix, Cut::columns,       uniform, in_parts, {}, 0, true},
    RoleRule{R::shared_down_lora_b, matrix, Cut::whole,         zero,    in_parts, {}, 0, true},
    // Of all experts those of a kind lie together: a product takes them with the rows of each.
    RoleRule{R::expert_gate_lora_a, matrix, Cut::whole,         uniform, by_tokens, {}, 1, true},
    RoleRule{R::expert_gate_lora_b, matrix, Cut::rows,          zero,    by_tokens, {}, 2, true},
    RoleRule{R::expert_up_lora_a,   matrix, Cut::whole,         uniform, by_tokens, {}, 3, true},
    RoleRule{R::expert_up_lora_b,   matrix, Cut::rows,          zero,    by_tokens, {}, 4, true},
    RoleRule{R::expert_down_lora_a, matrix, Cut::columns,       uniform, by_tokens, {}, 5, true},
    RoleRule{R::expert_down_lora_b, matrix, Cut::whole,         zero,    by_tokens, {}, 6, true},
};
// clang-format on

/// By the number of a role: its place above; -1: it has none.
constexpr auto role_places = [] {
  std::array<int, num_param_roles> out{};
  for (int& place : out) place = -1;
  for (std::size_t i = 0; i < role_rules.size(); ++i)
    out[static_cast<std::size_t>(role_rules[i].role)] = static_cast<int>(i);
  return out;
}();
constexpr bool each_has_a_place() {
  for (const int place : role_places)
    if (place < 0) return false;
  return role_rules.size() == role_places.size();
}
static_assert(each_has_a_place(), "one rule for each role");

}  // namespace

int place_in_unit(ParamRole role) { return role_places[static_cast<std::size_t>(role)]; }
const RoleRule& rule_of(ParamRole role) { return role_rules[static_cast<std::size_t>(place_in_unit(role))]; }
bool is_adapter(ParamRole role) { return rule_of(role).adapter; }

}  // namespace hotbunk
