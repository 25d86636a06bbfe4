#include "spec/stored_parameter.h"

#include <fmt/format.h>

#include <utility>

namespace hotbunk {
namespace {

/// c_attn.q, c_attn.k and c_attn.v of GPT-2: which of the three. −1: not packed.
int place_in_pack(ParamRole role) {
  switch (role) {
    case ParamRole::q_proj:
    case ParamRole::q_bias:
      return 0;
    case ParamRole::k_proj:
    case ParamRole::k_bias:
      return 1;
    case ParamRole::v_proj:
    case ParamRole::v_bias:
      return 2;
    default:
      return -1;
  }
}

void store_gpt2(const ModelSpec& model, const ParamSpec& p, StoredParameter& out) {
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

/// Of E experts with inner width I: gate_up_proj (E, H, 2 I) and its bias (E, 2 I), gates in even columns; down_proj
/// (E, I, H) and its bias (E, H).
void store_gpt_oss_expert(const ModelSpec& model, const ParamSpec& p, StoredParameter& out) {
  const bool up = p.role == ParamRole::expert_up || p.role == ParamRole::expert_up_bias,
             down = p.role == ParamRole::expert_down || p.role == ParamRole::expert_down_bias;
  const std::int64_t experts = model.moe->experts, wide = down ? p.shape[0] : 2 * p.shape[0];
  out.tensor = fmt::format("model.layers.{}.mlp.experts.{}", p.layer, down ? "down_proj" : "gate_up_proj");
  if (p.shape.size() == 1) out.tensor += "_bias", out.shape = {experts, wide};
  else out.shape = {experts, p.shape[1], wide};
  out.row_step = down ? 1 : 2, out.col_step = wide;
  out.first = p.expert * wide * (p.shape.size() == 1 ? 1 : p.shape[1]) + (up ? 1 : 0);
}

}  // namespace

StoredParameter stored(const ModelSpec& model, const ParamSpec& p) {
  StoredParameter out{.tensor = p.name, .shape = p.shape};
  if (p.shape.size() == 2) out.cols = out.row_step = p.shape[1];
  if (model.family == ModelFamily::gpt2 && p.layer >= 0) store_gpt2(model, p, out);
  if (model.family == ModelFamily::gpt_oss && p.expert >= 0) store_gpt_oss_expert(model, p, out);
  return out;
}

}  // namespace hotbunk
