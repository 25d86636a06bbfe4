#include "spec/stored_parameter.h"

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

}  // namespace

StoredParameter stored(const ModelSpec& model, const ParamSpec& p) {
  StoredParameter out{.tensor = p.name, .shape = p.shape};
  const bool matrix = p.shape.size() == 2;
  if (matrix) out.cols = p.shape[1];
  if (model.family != ModelFamily::gpt2 || p.layer < 0) return out;
  if (const int place = place_in_pack(p.role); place >= 0) {
    const std::size_t part = p.name.rfind('.') - 2;  // ".q" of c_attn.q.weight
    out.tensor.erase(part, 2);
    out.first = place == 0 ? 0 : model.q_rows() + (place - 1) * model.kv_rows();
    out.shape[0] = model.q_rows() + 2 * model.kv_rows();
  }
  if (matrix) {
    out.transposed = true;
    std::swap(out.shape[0], out.shape[1]);
  }
  return out;
}

}  // namespace hotbunk
