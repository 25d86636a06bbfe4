#include "shard/tensor_parallel.h"

#include <algorithm>

#include "base/check.h"
#include "base/rope.h"
#include "layout/shard.h"

namespace hotbunk {

std::int64_t TensorSharding::heads() const { return model.heads / tp.ranks / head_parts; }
std::int64_t TensorSharding::kv_heads() const {
  return std::max<std::int64_t>(1, std::max<std::int64_t>(1, model.kv_heads / tp.ranks) / head_parts);
}

Dim TensorSharding::stream_tokens() const {
  return tp.cuts_tokens() ? Dim{tokens.size * tp.token_sharers / tp.ranks, tp.tokens, 0} : tokens;
}

TensorSharding TensorSharding::of_experts() const {
  TensorSharding out = *this;
  if (blocks.count == 1) return out;
  const Dim own = stream_tokens();
  out.blocks = {};
  out.tp.ranks = tp.ranks / blocks.count;
  out.tp.group = blocks.group;
  if (out.tp.ranks == 1) out.tokens = own, out.tp.tokens = fixed_extent;
  else out.tokens = {tokens.size / blocks.count, blocks.tokens, 0};
  return out;
}

bool is_of_experts(Width w) {
  switch (w) {
    case Width::experts:
    case Width::choices:
    case Width::choice_rows:
    case Width::routed:
    case Width::expert_gate_up:
    case Width::expert_inner:
    case Width::expert_offsets:
      return true;
    default:
      return false;
  }
}

std::int64_t TensorSharding::width_of(Width width) const {
  if (blocks.count > 1 && is_of_experts(width)) return of_experts().width_of(width);
  switch (width) {
    case Width::one:
    case Width::token:
      return 1;
    case Width::hidden:
      return model.hidden;
    case Width::qkv:
      return (heads() + kv_heads()) * model.head_dim + kv_heads() * model.value_dim();
    case Width::attended:
      return heads() * model.value_dim();
    case Width::heads:
      return heads();
    case Width::qk_heads:
      return heads() + kv_heads();
    case Width::gate_up:
      return 2 * (model.intermediate / tp.ranks);
    case Width::inner:
      return model.intermediate / tp.ranks;
    case Width::queries:
      return heads() * model.head_dim;
    case Width::query_latent:
      return model.mla->q_lora_rank;
    case Width::latent_and_key:
      return model.mla->kept_dim();
    case Width::latent:
      return model.mla->kv_lora_rank;
    case Width::shared_key:
      return model.mla->qk_rope_head_dim;
    case Width::shared_gate_up:
      return 2 * (model.moe->shared_experts * model.moe->expert_intermediate / tp.ranks);
    case Width::shared_inner:
      return model.moe->shared_experts * model.moe->expert_intermediate / tp.ranks;
    case Width::beside_routed:
      return model.hidden;
    case Width::experts:
      return model.moe->experts;
    case Width::choices:
      return model.moe->experts_per_token;
    case Width::choice_rows:
      return model.moe->experts_per_token * ep.parts;
    case Width::routed:
      return model.hidden;
    case Width::expert_gate_up:
      return 2 * width_of(Width::expert_inner);
    case Width::expert_inner:
      return model.moe->expert_intermediate * tp.expert_ranks / (tp.ranks * ep.parts);
    case Width::expert_offsets:
      return model.moe->experts * ep.parts / tp.expert_ranks + 1;
  }
  HB_CHECK(false, "width {}", static_cast<int>(width));
  return 0;
}

namespace {

/// Rows of a rank's own tokens, one for each of their choices, or for each part of these.
Tensor make_choices(Emitter& to, const TensorSharding& s, const std::string& name, DType dtype, const Dim& width) {
  return to.make(name, dtype, {s.tokens, {s.width_of(Width::choice_rows), fixed_extent, 0}, width});
}

}  // namespace

Tensor make_value(Emitter& to, const TensorSharding& s, const ForwardValue& v, const std::string& name, DType dtype) {
  if (s.blocks.count > 1 && is_of_experts(v.width)) return make_value(to, s.of_experts(), v, name, dtype);
  const Dim rows = s.rows_of(v.width), width{s.width_of(v.width), fixed_extent, 0};
  switch (v.width) {
    case Width::one:
    case Width::token:
      return to.make(name, dtype, {rows});
    case Width::expert_offsets:
      return to.make(name, dtype, {width});
    case Width::expert_gate_up:
    case Width::expert_inner:
      if (s.ep.ranks == 1) return make_choices(to, s, name, dtype, width);
      return to.make(name, dtype, {s.ep.rows(0), width});
    case Width::routed:
      return make_choices(to, s, name, dtype, width);
    default:
      return to.make(name, dtype, {rows, width});
  }
}

Op& with_heads(Op& op, const TensorSharding& s) {
  with(with(op, Attr::heads, s.heads()), Attr::kv_heads, s.kv_heads());
  with(op, Attr::head_dim, s.model.head_dim);
  return s.model.mla
             ? with(with(op, Attr::value_dim, s.model.value_dim()), Attr::rope_dim, s.model.mla->qk_rope_head_dim)
             : op;
}

Op& with_attrs(Op& op, const ForwardOp& forward) {
  op.attrs.insert(op.attrs.end(), forward.attrs.begin(), forward.attrs.end());
  return op;
}

Op& with_rope(Op& op, const ModelSpec& model) {
  const std::int64_t turned = model.mla              ? model.mla->qk_rope_head_dim
                              : model.rotary_dim > 0 ? model.rotary_dim
                                                     : model.head_dim;
  with(op, Attr::rope_theta, model.rope_theta);
  if (!model.rope_scaling) return op;
  const RopeScaling& scaling = *model.rope_scaling;
  with(op, Attr::rope_factor, scaling.factor);
  if (scaling.type == "llama3") {
    with(op, Attr::rope_low, scaling.low_freq_factor);
    with(op, Attr::rope_high, scaling.high_freq_factor);
    return with(op, Attr::rope_original, scaling.original_max_position);
  }
  RampRopeScaling ramp{scaling.factor};
  if (scaling.type == "yarn")
    ramp =
        yarn_rope_scaling(turned, model.rope_theta, scaling.factor, static_cast<double>(scaling.original_max_position),
                          scaling.beta_fast, scaling.beta_slow, scaling.truncate);
  with(with(op, Attr::rope_ramp_begin, ramp.begin), Attr::rope_ramp_end, ramp.end);
  return scaling.attention_factor != 1.0 ? with(op, Attr::rope_amplitude, scaling.attention_factor) : op;
}

namespace {

/// Of so many ids each rank has `rows`.
Op& with_table(Op& op, const TensorSharding& s, std::int64_t ids, std::int64_t rows) {
  with(with(op, Attr::vocab_begin, std::int64_t{0}), Attr::vocab_end, s.tp.ranks == 1 ? ids : rows);
  if (s.tp.ranks == 1) return op;
  op.group = s.tp.group;  // each rank answers for its own rows
  return with(with(op, Attr::vocab_stride, rows), Attr::vocab, ids);
}

}  // namespace

Op& with_vocabulary(Op& op, const TensorSharding& s) {
  return with_table(op, s, s.model.vocab, s.model.vocab_rows(s.tp.ranks));
}
Op& with_positions(Op& op, const TensorSharding& s) {
  return with_table(op, s, s.model.max_position, ceil_div(s.model.max_position, s.tp.ranks));
}

Tensor all_tokens(Emitter& to, const TensorSharding& s, const std::string& name, const Tensor& x) {
  if (!s.tp.cuts_tokens()) return x;
  const Tensor all = to.make(name + ".all", x.dtype, {s.tokens, x.shape[1]});
  to.emit(OpKind::all_gather, s.tp.stream, name + ".all_gather", {x}, {all}).group = s.tp.token_group();
  return all;
}

Tensor make_summands(Emitter& to, const TensorSharding& s, const std::string& name, const Tensor& stream) {
  return s.tp.cuts_tokens() ? to.make(name + ".summands", stream.dtype, {s.tokens, stream.shape[1]}) : stream;
}

void sum_into_stream(Emitter& to, const TensorSharding& s, const std::string& op, const Tensor& summands,
                     const Tensor& stream) {
  if (s.tp.ranks == 1) return;
  if (s.tp.cuts_tokens()) {
    to.emit(OpKind::reduce_scatter, s.tp.stream, op + ".reduce_scatter", {summands}, {stream}).group =
        s.tp.token_group();
    if (s.tp.token_sharers > 1)
      to.emit(OpKind::all_reduce, s.tp.stream, op + ".all_reduce", {stream}, {stream}).group = s.tp.sharers;
  } else {
    to.emit(OpKind::all_reduce, s.tp.stream, op + ".all_reduce", {stream}, {stream}).group = s.tp.group;
  }
}

}  // namespace hotbunk
