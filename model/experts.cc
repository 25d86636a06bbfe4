#include "model/experts.h"

namespace hotbunk {

ValueId expert_mlp(Forward& f, ValueId normed) {
  using R = ParamRole;
  const ValueId logits = f.linear("router", normed, "router_logits", Width::experts, R::router);
  const Forward::Routed routed = f.route("route", logits);
  const ValueId x = f.dispatch("dispatch", normed, routed, "dispatched");
  const ValueId gate_up = f.grouped_linear("experts.gate_up_proj", x, routed, "expert_gate_up", Width::expert_gate_up,
                                           {R::expert_gate, R::expert_up});
  const ValueId activated = f.swiglu("experts.swiglu", gate_up, "expert_activated");
  const ValueId y =
      f.grouped_linear("experts.down_proj", activated, routed, "expert_out", Width::routed, R::expert_down);
  return f.combine("combine", y, routed, "mlp_out");
}

}  // namespace hotbunk
