#include "shard/expert_rounds.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "shard/writers.h"

namespace hotbunk {
namespace {

const ForwardOp& taker_of(const Forward& f, ValueId id) {
  const auto taker =
      std::ranges::find_if(f.ops(), [&](const ForwardOp& op) { return !op.inputs.empty() && op.inputs[0] == id; });
  HB_CHECK(taker != f.ops().end(), "nothing takes '{}'", f.value(id).name);
  return *taker;
}

}  // namespace

RoutedOps routed_ops(const Forward& f) {
  const auto dispatch = std::ranges::find(f.ops(), OpKind::dispatch, &ForwardOp::kind);
  HB_CHECK(dispatch != f.ops().end(), "rounds of a piece without experts");
  const ForwardOp& gate_up = taker_of(f, dispatch->outputs[0]);
  const ForwardOp& activation = taker_of(f, gate_up.outputs[0]);
  return {*dispatch, gate_up, activation, taker_of(f, activation.outputs[0])};
}

bool is_of_a_round(const Forward& f, const ForwardOp& op) {
  const Width width = f.value(op.outputs[0]).width;
  return width == Width::expert_gate_up || width == Width::expert_inner;
}

Round play_round(Emitter& to, const Forward& f, const TensorSharding& s, const RoutedOps& ops, const Values& values,
                 std::int64_t round, const std::string& suffix) {
  const auto at = [&](ValueId id) {
    HB_CHECK(is_there(values, id), "a round lacks '{}'", f.value(id).name);
    return values[static_cast<std::size_t>(id)];
  };
  const auto make = [&](const ForwardOp& op) {
    const ForwardValue& v = f.value(op.outputs[0]);
    return make_routed(to, s, v.name + suffix, s.compute, {s.width_of(v.width), fixed_extent, 0}, round);
  };
  const auto emit = [&](const ForwardOp& op, std::vector<Tensor> inputs, const Tensor& y) -> Op& {
    return with_count_of_rows(to.emit(op.kind, lead_stream, op.name + suffix, std::move(inputs), {y}), f, s, values);
  };
  Round out;
  out.x =
      to_experts(to, f, s, f.value(ops.dispatch.outputs[0]).name + suffix, at(ops.dispatch.outputs[0]), values, round);
  out.gate_up = make(ops.gate_up);
  std::vector<Tensor> inputs = {out.x, to.weight(ops.gate_up.weights[0]), at(ops.gate_up.inputs[1])};
  if (ops.gate_up.weights.size() > 1) inputs.push_back(to.weight(ops.gate_up.weights[1]));
  emit(ops.gate_up, std::move(inputs), out.gate_up);
  ExpertAdapters(to, f, s, values, ops.gate_up, at(ops.gate_up.inputs[1]), suffix).add(out.x, out.gate_up);
  out.activated = make(ops.activation);
  with_attrs(emit(ops.activation, {out.gate_up}, out.activated), ops.activation);
  return out;
}

void ForwardWriter::rounds(const ForwardOp& down) {
  const RoutedOps ops = routed_ops(f_);
  const Tensor y = make(down.outputs[0]);
  const std::string& name = f_.value(down.outputs[0]).name;
  for (std::int64_t r = 0; r < e_.ep.rounds(); ++r) {
    const std::string suffix = fmt::format(".round{}", r);
    const Round round = play_round(to_, f_, e_, ops, values_, r, suffix);
    const Tensor found = make_routed(to_, e_, name + ".routed" + suffix, y.dtype, y.shape[2], r);
    std::vector<Tensor> inputs = {round.activated, to_.weight(down.weights[0]), at(down.inputs[1])};
    if (down.weights.size() > 1) inputs.push_back(to_.weight(down.weights[1]));
    with_bias_share(emit(down.kind, down.name + suffix, std::move(inputs), {found}), down, true, e_);
    ExpertAdapters(to_, f_, e_, values_, down, at(down.inputs[1]), suffix).add(round.activated, found);
    from_experts(to_, f_, e_, name + suffix, found, y, values_, r);
  }
}

void BackwardWriter::rounds(const ForwardOp& down) {
  const RoutedOps ops = routed_ops(f_);
  const ForwardValue &x = f_.value(ops.dispatch.outputs[0]), &y = f_.value(down.outputs[0]);
  const Tensor dy = gradient(down.outputs[0]), offsets = value(down.inputs[1]);
  const Tensor d_choices = gradient_of(ops.dispatch.outputs[0]) =
      make_value(to_, e_, x, "d_" + x.name + ".choices", e_.compute);
  for (std::int64_t r = 0; r < e_.ep.rounds(); ++r) {
    const std::string suffix = fmt::format(".round{}", r);
    const auto make_gradient = [&](const Tensor& of, const ForwardOp& op) {
      return make_routed(to_, e_, "d_" + f_.value(op.outputs[0]).name + suffix, e_.compute, of.shape[1], r);
    };
    const std::int64_t accumulate = r > 0 ? 1 : accumulate_;
    const auto wgrad = [&](const ForwardOp& op, const Tensor& d, const Tensor& in, bool leaves) {
      if (!e_.trains(op.weights[0].first)) return;
      std::vector<Tensor> outputs;
      for (const Weight& w : op.weights) outputs.push_back(to_.gradient(w));
      Op& grad = emit(OpKind::grouped_linear_wgrad, op.name + ".wgrad" + suffix, {d, in, offsets}, std::move(outputs));
      with_bias_share(with(grad, Attr::accumulate, accumulate), op, leaves, e_);
    };
    const auto dgrad = [&](const ForwardOp& op, const Tensor& d, const Tensor& to) {
      emit(OpKind::grouped_linear_dgrad, op.name + ".dgrad" + suffix, {d, to_.weight(op.weights[0]), offsets}, {to});
    };
    const Tensor d_found = to_experts(to_, f_, e_, "d_" + y.name + ".routed" + suffix, dy, values_, r);
    const Round again = play_round(to_, f_, e_, ops, values_, r, ".again" + suffix);
    const ExpertAdapters of_down(to_, f_, e_, values_, down, offsets, suffix),
        of_gate_up(to_, f_, e_, values_, ops.gate_up, offsets, suffix);
    const std::vector<Tensor> d_down = of_down.through(d_found);
    if (!down.adapters.empty()) of_down.of_weights(to_, again.activated, d_found, d_down, accumulate);
    wgrad(down, d_found, again.activated, true);
    const Tensor d_activated = make_gradient(again.activated, ops.activation);
    dgrad(down, d_found, d_activated);
    of_down.of_input(d_down, d_activated);
    const Tensor d_gate_up = make_gradient(again.gate_up, ops.gate_up);
    with_attrs(emit(backward_of_activation(ops.activation.kind), ops.activation.name + ".backward" + suffix,
                    {d_activated, again.gate_up}, {d_gate_up}),
               ops.activation);
    const std::vector<Tensor> d_of_gate_up = of_gate_up.through(d_gate_up);
    if (!ops.gate_up.adapters.empty()) of_gate_up.of_weights(to_, again.x, d_gate_up, d_of_gate_up, accumulate);
    wgrad(ops.gate_up, d_gate_up, again.x, false);
    const Tensor d_x = make_gradient(again.x, ops.dispatch);
    dgrad(ops.gate_up, d_gate_up, d_x);
    of_gate_up.of_input(d_of_gate_up, d_x);
    from_experts(to_, f_, e_, "d_" + x.name + suffix, d_x, d_choices, values_, r);
  }
}

}  // namespace hotbunk
