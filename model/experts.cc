#include "model/experts.h"

#include <optional>

namespace hotbunk {
namespace {

using R = ParamRole;

/// One MLP as wide as all of them together.
ValueId shared_mlp(Forward& f, const ModelSpec& model, ValueId normed) {
  const ValueId gate_up = f.adapted(model, "shared_experts.gate_up_proj", normed, "shared_gate_up",
                                    Width::shared_gate_up, {R::shared_gate, R::shared_up});
  const ValueId activated = f.swiglu("shared_experts.swiglu", gate_up, "shared_activated");
  return f.adapted(model, "shared_experts.down_proj", activated, "shared_out", Width::beside_routed, R::shared_down);
}

}  // namespace

ValueId expert_mlp(Forward& f, const ModelSpec& model, ValueId normed) {
  const MoeSpec& moe = *model.moe;
  const auto bias = [&](Weight weight) { return moe.biases ? std::optional(weight) : std::nullopt; };
  const ValueId logits =
      f.linear("router", normed, "router_logits", Width::experts, R::router, bias(R::router_linear_bias));
  const Forward::Routed routed =
      f.route("route", logits, moe.router_bias ? std::optional<Weight>(R::router_bias) : std::nullopt);
  const std::optional<ValueId> shared =
      moe.shared_experts > 0 ? std::optional(shared_mlp(f, model, normed)) : std::nullopt;
  const ValueId x = f.dispatch("dispatch", normed, routed, "dispatched");
  const ValueId gate_up =
      f.grouped_linear(model, "experts.gate_up_proj", x, routed, "expert_gate_up", Width::expert_gate_up,
                       {R::expert_gate, R::expert_up}, bias({R::expert_gate_bias, R::expert_up_bias}));
  const ValueId activated = moe.swiglu_limit > 0.0 ? f.clamped_swiglu("experts.swiglu", gate_up, "expert_activated",
                                                                      moe.swiglu_limit, moe.swiglu_alpha)
                                                   : f.swiglu("experts.swiglu", gate_up, "expert_activated");
  const ValueId y = f.grouped_linear(model, "experts.down_proj", activated, routed, "expert_out", Width::routed,
                                     R::expert_down, bias(R::expert_down_bias));
  return f.combine("combine", y, routed, "mlp_out", shared);
}

}  // namespace hotbunk
