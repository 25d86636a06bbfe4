// The rules of latent attention. Training makes keys and values of all of a rank's heads from the latents and attends
// as it does otherwise, with one KV head for each query head; an engine attends to the latents that it keeps.
#include <utility>

#include "shard/ulysses.h"
#include "shard/writers.h"

namespace hotbunk {
namespace {

Op& with_shared_rope(Op& op, const ModelSpec& model) {
  return with_rope(with(op, Attr::rope_dim, model.mla->qk_rope_head_dim), model);
}

/// Of each head the part of its key that is its own, and its value.
Tensor make_expanded(Emitter& to, const TensorSharding& s, const std::string& name) {
  const std::int64_t width = s.heads() * (s.model.mla->qk_nope_head_dim + s.model.mla->v_head_dim);
  return to.make(name, s.compute, {s.tokens, {width, fixed_extent, 0}});
}

}  // namespace

bool Emitter::attend_latents(const TensorSharding&, const ForwardOp&, const LatentInputs&, const Tensor&) {
  return false;
}

void ForwardWriter::latent_norm(const ForwardOp& op) {
  Op& norm = emit(op.kind, op.name, {at(op.inputs[0]), to_.weight(op.weights[0]), to_.positions()},
                  {make(op.outputs[0]), make(op.outputs[1]), make(op.outputs[2])});
  with_shared_rope(with_attrs(norm, op), s_.model);
}

void ForwardWriter::latent_attention(const ForwardOp& op) {
  const LatentInputs in{at(op.inputs[0]), at(op.inputs[1]), at(op.inputs[2])};
  const Tensor y = make(op.outputs[0]);
  if (to_.attend_latents(s_, op, in, y)) return;
  const Tensor kv = make_expanded(to_, s_, op.name + ".kv");
  emit(OpKind::linear, op.name + ".kv_b_proj", {in.latent, to_.weight(op.weights[0])}, {kv});
  add_adapters(op, in.latent, kv);
  const Tensor packed = make(op.outputs[2]);
  with_heads(emit(OpKind::latent_heads, op.name + ".heads", {in.queries, kv, in.shared_key}, {packed}), s_);
  const std::string &whole = f_.value(op.outputs[2]).name, &out = f_.value(op.outputs[0]).name;
  const Tensor qkv = by_heads(to_, s_, HeadsOf::qkv, whole, packed),
               attended = make_by_heads(to_, s_, HeadsOf::attended, out, y);
  const auto set = [&](ValueId id, const Tensor& t) { values_[static_cast<std::size_t>(id)] = t; };
  set(op.outputs[1], to_.attend(in_attention(s_), op, qkv, attended));
  by_tokens(to_, s_, HeadsOf::attended, out, attended, y);
  set(in_attention(f_, s_, op.outputs[2]), qkv), set(in_attention(f_, s_, op.outputs[0]), attended);
}

void BackwardWriter::latent_norm(const ForwardOp& op) {
  const Tensor dx = make(op.inputs[0]);
  std::vector<Tensor> outputs = {dx};
  if (s_.trains(op.weights[0].first)) outputs.push_back(to_.gradient(op.weights[0]));
  Op& norm = emit(OpKind::latent_norm_backward, op.name + ".backward",
                  {gradient(op.outputs[0]), gradient(op.outputs[1]), value(op.inputs[0]), to_.weight(op.weights[0]),
                   value(op.outputs[2]), to_.positions()},
                  std::move(outputs));
  with_shared_rope(with(norm, Attr::accumulate, accumulate_), s_.model);
}

void BackwardWriter::latent_attention(const ForwardOp& op) {
  const ForwardValue& packed = f_.value(op.outputs[2]);
  const Tensor d_qkv = make_value(to_, s_, packed, "d_" + packed.name, s_.compute);
  const std::string whole = "d_" + packed.name, out = "d_" + f_.value(op.outputs[0]).name;
  const Tensor d_attended = by_heads(to_, s_, HeadsOf::attended, out, gradient(op.outputs[0])),
               d_by_heads = make_by_heads(to_, s_, HeadsOf::qkv, whole, d_qkv);
  to_.attend_backward(in_attention(s_), op, d_attended, value(in_attention(f_, s_, op.outputs[2])),
                      value(in_attention(f_, s_, op.outputs[0])), value(op.outputs[1]), d_by_heads);
  by_tokens(to_, s_, HeadsOf::qkv, whole, d_by_heads, d_qkv);
  const Tensor d_q = make(op.inputs[0]), d_kv = make_expanded(to_, s_, "d_" + op.name + ".kv"),
               d_key = make(op.inputs[2]);
  with_heads(emit(OpKind::latent_heads_backward, op.name + ".heads.backward", {d_qkv}, {d_q, d_kv, d_key}), s_);
  const std::vector<Tensor> d_down = through_adapters(op, d_kv);
  if (!op.adapters.empty()) of_adapters(op, value(op.inputs[1]), d_kv, d_down);
  if (s_.trains(op.weights[0].first))
    with(emit(OpKind::linear_wgrad, op.name + ".kv_b_proj.wgrad", {d_kv, value(op.inputs[1])},
              {to_.gradient(op.weights[0])}),
         Attr::accumulate, accumulate_);
  const Tensor d_latent = make(op.inputs[1]);
  emit(OpKind::linear_dgrad, op.name + ".kv_b_proj.dgrad", {d_kv, to_.weight(op.weights[0])}, {d_latent});
  add_of_adapters(op, d_down, d_latent);
}

}  // namespace hotbunk
