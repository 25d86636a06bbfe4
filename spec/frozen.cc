#include "spec/frozen.h"

#include <array>
#include <map>
#include <sstream>
#include <utility>

#include "spec/wrapping.h"

namespace hotbunk {
namespace {

using R = ParamRole;

/// Roles whose gradients one op makes: the first one stands for all.
R group_of(R role) {
  switch (role) {
    case R::k_proj:
    case R::v_proj:
    case R::q_bias:
    case R::k_bias:
    case R::v_bias:
      return R::q_proj;
    case R::k_norm:
      return R::q_norm;
    case R::o_bias:
      return R::o_proj;
    case R::up_proj:
    case R::up_bias:
      return R::gate_proj;
    case R::down_bias:
      return R::down_proj;
    case R::position_embedding:
      return R::embedding;
    case R::input_norm_bias:
      return R::input_norm;
    case R::post_norm_bias:
      return R::post_norm;
    case R::final_norm_bias:
      return R::final_norm;
    case R::router_linear_bias:
      return R::router;
    case R::shared_up:
      return R::shared_gate;
    case R::expert_up:
    case R::expert_gate_bias:
    case R::expert_up_bias:
      return R::expert_gate;
    case R::expert_down_bias:
      return R::expert_down;
    default:
      return role;
  }
}

}  // namespace

std::vector<std::string> frozen_patterns(const ModelSpec& model) {
  std::vector<std::string> out;
  std::istringstream in(model.frozen);
  for (std::string pattern; std::getline(in, pattern, '-');) out.push_back(pattern);
  return out;
}

bool is_frozen(const std::vector<std::string>& patterns, const std::string& parameter) {
  for (const std::string& pattern : patterns)
    if (matches(pattern, parameter)) return true;
  return false;
}

std::vector<FrozenRoles> frozen_roles(const ModelSpec& model) {
  if (model.frozen.empty()) return {};
  std::vector<FrozenRoles> out(static_cast<std::size_t>(model.layers) + 1);
  for (const ParamSpec& p : parameters_of(model))
    if (p.frozen) out[static_cast<std::size_t>(p.layer + 1)].set(static_cast<std::size_t>(p.role));
  return out;
}

std::pair<std::string, std::string> split_group(const ModelSpec& model) {
  std::map<std::pair<int, R>, const ParamSpec*> first;
  const std::vector<ParamSpec> parameters = parameters_of(model);
  for (const ParamSpec& p : parameters) {
    const auto at = first.try_emplace({p.layer, group_of(p.role)}, &p).first;
    if (at->second->frozen != p.frozen) return {at->second->name, p.name};
  }
  return {};
}

}  // namespace hotbunk
