#include "model/forward.h"

#include <utility>

#include "spec/parameter_roles.h"

namespace hotbunk {

bool Weight::has(ParamRole role) const {
  return place_in_unit(first) <= place_in_unit(role) && place_in_unit(role) <= place_in_unit(last);
}

ValueId Forward::make(std::string name, Width width, Content content) {
  values_.push_back({std::move(name), width, content});
  return static_cast<ValueId>(values_.size()) - 1;
}

ValueId Forward::input(std::string name, Width width) { return make(std::move(name), width); }

ValueId Forward::embedding(std::string op, std::string out, Weight table, double factor,
                           std::optional<Weight> positions) {
  const ValueId y = make(std::move(out), Width::hidden);
  ForwardOp found{OpKind::embedding, std::move(op), {}, {table}, {y}};
  if (positions) found.weights.push_back(*positions);
  if (factor != 1.0) found.attrs.emplace_back(Attr::factor, factor);
  ops_.push_back(std::move(found));
  return y;
}

Forward::Normed Forward::norm(ForwardOp op, std::optional<ValueId> residual, std::string normed, std::string sum) {
  const Width width = value(op.inputs[0]).width;
  const ValueId rstd = make(normed + ".rstd", width == Width::hidden ? Width::one : Width::token, Content::statistic),
                y = make(std::move(normed), width), added = make(std::move(sum), width);
  op.outputs = {y, rstd, added};
  if (residual) op.inputs.push_back(*residual);
  ops_.push_back(std::move(op));
  return {y, added};
}

Forward::Normed Forward::rms_norm(std::string op, ValueId x, std::optional<ValueId> residual, Weight weight,
                                  std::string normed, std::string sum, double offset, double eps) {
  ForwardOp of{OpKind::rms_norm, std::move(op), {x}, {weight}, {}};
  if (eps != 0.0) of.attrs.emplace_back(Attr::eps, eps);
  if (offset != 0.0) of.attrs.emplace_back(Attr::offset, offset);
  return norm(std::move(of), residual, std::move(normed), std::move(sum));
}

Forward::Normed Forward::layer_norm(std::string op, ValueId x, std::optional<ValueId> residual, Weight weight,
                                    Weight bias, std::string normed, std::string sum) {
  return norm({OpKind::layer_norm, std::move(op), {x}, {weight, bias}, {}}, residual, std::move(normed),
              std::move(sum));
}

ValueId Forward::linear(std::string op, ValueId x, std::string out, Width width, Weight matrix,
                        std::optional<Weight> bias) {
  // Which expert is best is decided among numbers that lie close together.
  const ValueId y = make(std::move(out), width, width == Width::experts ? Content::statistic : Content::computed);
  ForwardOp linear{OpKind::linear, std::move(op), {x}, {matrix}, {y}};
  if (bias) linear.weights.push_back(*bias);
  ops_.push_back(std::move(linear));
  return y;
}

void Forward::add_adapters(const ModelSpec& model, ForwardOp& op) {
  if (!model.lora.on()) return;
  std::vector<Adapter>& adapters = op.adapters;
  for (const LoraTarget& t : lora_targets_of(model)) {
    if (!op.weights[0].has(t.base) || !model.adapts(t.base)) continue;
    if (!adapters.empty() && adapters.back().a.first == t.a) adapters.back().b.last = t.b;  // one module's
    else adapters.push_back({t.base, t.a, t.b, model.lora.factor(), t.op});
  }
}

ValueId Forward::adapted(const ModelSpec& model, std::string op, ValueId x, std::string out, Width width, Weight matrix,
                         std::optional<Weight> bias) {
  const ValueId y = linear(std::move(op), x, std::move(out), width, matrix, bias);
  add_adapters(model, ops_.back());
  return y;
}

ValueId Forward::qk_norm(std::string op, ValueId x, std::string out, Weight q, Weight k, double offset) {
  const ValueId rstd = make(out + ".rstd", Width::qk_heads, Content::statistic),
                y = make(std::move(out), value(x).width);
  ops_.push_back({OpKind::qk_norm, std::move(op), {x}, {q, k}, {y, rstd}});
  if (offset != 0.0) ops_.back().attrs.emplace_back(Attr::offset, offset);
  return y;
}

ValueId Forward::rope(std::string op, ValueId x, double theta) {
  ops_.push_back({OpKind::rope, std::move(op), {x}, {}, {x}});
  if (theta != 0.0) ops_.back().attrs.emplace_back(Attr::rope_theta, theta);
  return x;
}

ValueId Forward::attention(std::string op, ValueId x, std::string out, const AttentionScores& scores,
                           std::optional<Weight> sinks) {
  const ValueId lse = make(out + ".lse", Width::heads, Content::statistic), y = make(std::move(out), Width::attended);
  ForwardOp attention{OpKind::attention, std::move(op), {x}, {}, {y, lse}};
  if (sinks) attention.weights.push_back(*sinks);
  if (scores.window > 0) attention.attrs.emplace_back(Attr::window, scores.window);
  if (scores.scale > 0.0) attention.attrs.emplace_back(Attr::scale, scores.scale);
  if (scores.softcap > 0.0) attention.attrs.emplace_back(Attr::softcap, scores.softcap);
  ops_.push_back(std::move(attention));
  return y;
}

Forward::Latent Forward::latent_norm(std::string op, ValueId x, Weight weight, double eps) {
  const ValueId latent = make("latent", Width::latent), key = make("shared_key", Width::shared_key),
                rstd = make("latent.rstd", Width::token, Content::statistic);
  ops_.push_back({OpKind::latent_norm, std::move(op), {x}, {weight}, {latent, key, rstd}, {{Attr::eps, eps}}});
  return {latent, key};
}

ValueId Forward::latent_attention(const ModelSpec& model, std::string op, ValueId queries, const Latent& kept,
                                  std::string out, Weight expansion, const AttentionScores& scores) {
  const ValueId lse = make(out + ".lse", Width::heads, Content::statistic), qkv = make(op + ".qkv", Width::qkv),
                y = make(std::move(out), Width::attended);
  ForwardOp attention{
      OpKind::latent_attention, std::move(op), {queries, kept.latent, kept.key}, {expansion}, {y, lse, qkv}};
  if (scores.scale > 0.0) attention.attrs.emplace_back(Attr::scale, scores.scale);
  add_adapters(model, attention);
  ops_.push_back(std::move(attention));
  return y;
}

ValueId Forward::clamped_swiglu(std::string op, ValueId x, std::string out, double limit, double alpha) {
  const ValueId y = activation(OpKind::clamped_swiglu, std::move(op), x, std::move(out));
  ops_.back().attrs = {{Attr::limit, limit}, {Attr::alpha, alpha}};
  return y;
}

ValueId Forward::activation(OpKind kind, std::string op, ValueId x, std::string out) {
  const Width of = value(x).width, width = of == Width::expert_gate_up   ? Width::expert_inner
                                           : of == Width::shared_gate_up ? Width::shared_inner
                                                                         : Width::inner;
  const ValueId y = make(std::move(out), width);
  ops_.push_back({kind, std::move(op), {x}, {}, {y}});
  return y;
}

Forward::Routed Forward::route(std::string op, ValueId logits, std::optional<Weight> bias) {
  const ValueId weights = make(op + ".weights", Width::choices, Content::statistic),
                experts = make(op + ".experts", Width::choices, Content::index),
                rows = make(op + ".rows", Width::choice_rows, Content::index),
                offsets = make(op + ".offsets", Width::expert_offsets, Content::index);
  ForwardOp route{OpKind::route, op, {logits}, {}, {weights, experts}};
  if (bias) route.weights.push_back(*bias);
  ops_.push_back(std::move(route));
  ops_.push_back({OpKind::expert_sort, std::move(op) + ".sort", {experts}, {}, {rows, offsets}});
  return {weights, rows, offsets};
}

ValueId Forward::dispatch(std::string op, ValueId x, const Routed& routed, std::string out) {
  const ValueId y = make(std::move(out), Width::routed);
  ops_.push_back({OpKind::dispatch, std::move(op), {x, routed.rows}, {}, {y}});
  return y;
}

ValueId Forward::grouped_linear(const ModelSpec& model, std::string op, ValueId x, const Routed& routed,
                                std::string out, Width width, Weight matrices, std::optional<Weight> biases) {
  const ValueId y = make(std::move(out), width);
  ops_.push_back({OpKind::grouped_linear, std::move(op), {x, routed.offsets}, {matrices}, {y}});
  if (biases) ops_.back().weights.push_back(*biases);
  add_adapters(model, ops_.back());
  return y;
}

ValueId Forward::combine(std::string op, ValueId y, const Routed& routed, std::string out,
                         std::optional<ValueId> base) {
  const ValueId z = make(std::move(out), Width::hidden);
  ops_.push_back({OpKind::combine, std::move(op), {y, routed.rows, routed.weights}, {}, {z}});
  if (base) ops_.back().inputs.push_back(*base);
  return z;
}

}  // namespace hotbunk
