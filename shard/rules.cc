#include "shard/rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/check.h"
#include "shard/expert_rounds.h"
#include "shard/ulysses.h"
#include "shard/writers.h"

namespace hotbunk {
namespace {

/// What a norm has of its own, or else the model's.
double eps_of(const ForwardOp& op, const ModelSpec& model) {
  for (const auto& [attr, value] : op.attrs)
    if (attr == Attr::eps) return std::get<double>(value);
  return model.norm_eps;
}
/// Adds the rest of what the forward says.
Op& with_others(Op& op, const ForwardOp& forward) {
  for (const auto& attr : forward.attrs)
    if (attr.first != Attr::eps) op.attrs.push_back(attr);
  return op;
}

OpKind backward_of_norm(OpKind k) {
  return k == OpKind::rms_norm ? OpKind::rms_norm_backward : OpKind::layer_norm_backward;
}
/// The heads that an op turns: of latent attention queries alone; and how much of each.
Op& with_turned(Op& op, const TensorSharding& s) {
  if (!s.model.mla) {
    with_heads(op, s);
    return s.model.rotary_dim > 0 ? with(op, Attr::rope_first, s.model.rotary_dim) : op;
  }
  with(with(op, Attr::heads, s.heads()), Attr::kv_heads, std::int64_t{0});
  return with(with(op, Attr::head_dim, s.model.head_dim), Attr::rope_dim, s.model.mla->qk_rope_head_dim);
}

/// By the table that the forward names, or else the model's.
Op& with_turn(Op& op, const ForwardOp& forward, const ModelSpec& model) {
  return forward.attrs.empty() ? with_rope(op, model) : with_attrs(op, forward);
}

}  // namespace

OpKind backward_of_activation(OpKind k) {
  return k == OpKind::swiglu           ? OpKind::swiglu_backward
         : k == OpKind::clamped_swiglu ? OpKind::clamped_swiglu_backward
         : k == OpKind::geglu          ? OpKind::geglu_backward
                                       : OpKind::gelu_backward;
}

void ForwardWriter::write(const ForwardOp& op) {
  switch (op.kind) {
    case OpKind::embedding: {
      const Tensor y = make(op.outputs[0]), found = make_summands(to_, s_, f_.value(op.outputs[0]).name, y);
      with_attrs(with_vocabulary(emit(op.kind, op.name, {to_.weight(op.weights[0]), to_.ids()}, {found}), s_), op);
      if (op.weights.size() > 1) add_positions(op, found);
      return sum_into_stream(to_, s_, op.name, found, y);
    }
    case OpKind::rms_norm:
    case OpKind::layer_norm:
      return norm(op);
    case OpKind::linear:
      return linear(op);
    case OpKind::qk_norm: {
      Op& n = emit(op.kind, op.name, {at(op.inputs[0]), to_.weight(op.weights[0]), to_.weight(op.weights[1])},
                   {make(op.outputs[0]), make(op.outputs[1])});
      with_others(with(with_heads(n, s_), Attr::eps, s_.model.norm_eps), op);
      return;
    }
    case OpKind::rope: {
      const Tensor& x = at(op.inputs[0]);
      with_turn(with_turned(emit(op.kind, op.name, {x, to_.positions()}, {x}), s_), op, s_.model);
      return;
    }
    case OpKind::attention:
      return attention(op);
    case OpKind::latent_norm:
      return latent_norm(op);
    case OpKind::latent_attention:
      return latent_attention(op);
    case OpKind::swiglu:
    case OpKind::clamped_swiglu:
    case OpKind::geglu:
    case OpKind::gelu:
      if (in_rounds(s_) && is_of_a_round(f_, op)) return;
      with_attrs(emit(op.kind, op.name, {at(op.inputs[0])}, {make(op.outputs[0])}), op);
      return;
    case OpKind::route:
      return route(op);
    case OpKind::expert_sort:
      return expert_sort(op);
    case OpKind::dispatch:
      return dispatch(op);
    case OpKind::grouped_linear:
      return grouped_linear(op);
    case OpKind::combine:
      return combine(op);
    default:
      HB_CHECK(false, "a forward has no {}", name_of(op.kind));
  }
}

Tensor ForwardWriter::make(ValueId id) {
  const ForwardValue& v = f_.value(id);
  const DType dtype = v.content == Content::computed    ? s_.compute
                      : v.content == Content::statistic ? DType::f32
                                                        : DType::i32;
  return values_[static_cast<std::size_t>(id)] = make_value(to_, s_, v, v.name, dtype);
}

Tensor ForwardWriter::all_tokens_of(ValueId id, bool of_block) {
  const auto known = gathered_.find({id, of_block});
  if (known != gathered_.end()) return known->second;
  const std::string& name = f_.value(id).name;
  return gathered_[{id, of_block}] =
             of_block ? all_tokens(to_, e_, name + ".block", at(id)) : all_tokens(to_, s_, name, at(id));
}

/// The positions' table is cut over the ranks as the vocabulary's is: what both leave is one sum over them.
void ForwardWriter::add_positions(const ForwardOp& op, const Tensor& found) {
  const std::string& name = f_.value(op.outputs[0]).name;
  const Tensor learned = to_.make(name + ".positions", found.dtype, {found.shape[0], found.shape[1]});
  with_positions(emit(op.kind, op.name + ".positions", {to_.weight(op.weights[1]), to_.positions()}, {learned}), s_);
  emit(OpKind::add, op.name + ".add", {found, learned}, {found});
}

void ForwardWriter::norm(const ForwardOp& op) {
  const ValueId sum = sum_of(op);
  const bool kept = is_there(values_, sum), adds = !kept && op.inputs.size() > 1;
  if (!kept && !adds) values_[static_cast<std::size_t>(sum)] = at(op.inputs[0]);
  std::vector<Tensor> inputs = {adds ? at(op.inputs[0]) : at(sum)};
  for (const Weight& w : op.weights) inputs.push_back(to_.weight(w));
  if (adds) inputs.push_back(at(op.inputs[1]));
  std::vector<Tensor> outputs = {make(op.outputs[0]), make(op.outputs[1])};
  if (adds) outputs.push_back(make(sum));
  with_others(with(emit(op.kind, op.name, std::move(inputs), std::move(outputs)), Attr::eps, eps_of(op, s_.model)), op);
}

/// It takes all tokens of its heads, and finds and leaves all heads of its tokens.
void ForwardWriter::attention(const ForwardOp& op) {
  const std::string &in = f_.value(op.inputs[0]).name, &out = f_.value(op.outputs[0]).name;
  const Tensor& held = values_[static_cast<std::size_t>(in_attention(f_, s_, op.inputs[0]))];
  const Tensor qkv = held.buffer >= 0 ? held : by_heads(to_, s_, HeadsOf::qkv, in, at(op.inputs[0]));
  const Tensor y = make(op.outputs[0]), attended = make_by_heads(to_, s_, HeadsOf::attended, out, y);
  const auto set = [&](ValueId id, const Tensor& t) { values_[static_cast<std::size_t>(id)] = t; };
  const Tensor lse = to_.attend(in_attention(s_), op, qkv, attended);
  set(op.outputs[1], lse);
  if (!op.weights.empty()) {
    Op& sinks =
        emit(OpKind::attention_sinks, op.name + ".sinks", {attended, lse, to_.weight(op.weights[0])}, {attended, lse});
    if (s_.ulysses.ranks > 1) sinks.group = s_.ulysses.group;  // of which each has its heads'
  }
  by_tokens(to_, s_, HeadsOf::attended, out, attended, y);
  set(in_attention(f_, s_, op.inputs[0]), qkv), set(in_attention(f_, s_, op.outputs[0]), attended);
}

void ForwardWriter::linear(const ForwardOp& op) {
  const bool takes_stream = f_.value(op.inputs[0]).width == Width::hidden,
             leaves_stream = f_.value(op.outputs[0]).width == Width::hidden;
  const bool of_block = is_of_block(f_, s_, op);
  std::vector<Tensor> inputs = {takes_stream ? all_tokens_of(op.inputs[0], of_block) : at(op.inputs[0])};
  inputs.push_back(to_.weight(op.weights[0]));
  // What ranks sum gets its bias behind that, once.
  const bool has_bias = op.weights.size() > 1, bias_of_sum = has_bias && leaves_stream && s_.tp.ranks > 1;
  if (has_bias && !bias_of_sum) inputs.push_back(to_.weight(op.weights[1]));
  const Tensor y = make(op.outputs[0]);
  const Tensor found = leaves_stream ? make_summands(to_, s_, f_.value(op.outputs[0]).name, y) : y;
  const Tensor x = inputs.front();
  emit(op.kind, op.name, std::move(inputs), {found});
  add_adapters(op, x, found);
  if (leaves_stream) sum_into_stream(to_, s_, op.name, found, y);
  if (bias_of_sum) emit(OpKind::add_bias, op.name + ".bias", {y, to_.weight(op.weights[1])}, {y});
}

BackwardWriter::BackwardWriter(const Forward& f, const TensorSharding& s, BackwardEmitter& to, const Values& values,
                               Values& gradients, bool accumulate)
    : f_(f),
      s_(s),
      e_(s.of_experts()),
      to_(to),
      values_(values),
      gradients_(gradients),
      accumulate_(accumulate ? 1 : 0) {
  gradients_.resize(f.values().size());
  for (const ForwardOp& op : f.ops())
    if (op.kind == OpKind::linear || op.kind == OpKind::dispatch) ++takers_[{op.inputs[0], is_of_block(f, s, op)}];
}

void BackwardWriter::write(const ForwardOp& op) {
  switch (op.kind) {
    case OpKind::embedding: {
      if (!s_.trains(op.weights[0].first)) return;
      const Tensor d = all_tokens(to_, s_, "d_" + f_.value(op.outputs[0]).name, gradient(op.outputs[0]));
      Op& scatter = with_vocabulary(
          emit(OpKind::embedding_backward, op.name + ".backward", {to_.ids(), d}, {to_.gradient(op.weights[0])}), s_);
      with_attrs(with(scatter, Attr::accumulate, std::int64_t{1}), op);
      if (op.weights.size() == 1) return;
      Op& learned = emit(OpKind::embedding_backward, op.name + ".positions.backward", {to_.positions(), d},
                         {to_.gradient(op.weights[1])});
      with(with_positions(learned, s_), Attr::accumulate, std::int64_t{1});
      return;
    }
    case OpKind::rms_norm:
    case OpKind::layer_norm:
      return norm(op);
    case OpKind::linear:
      return linear(op);
    case OpKind::qk_norm: {
      const Tensor d = gradient(op.outputs[0]);  // in place
      std::vector<Tensor> outputs = {d};
      if (s_.trains(op.weights[0].first))
        for (const Weight& w : op.weights) outputs.push_back(to_.gradient(w));
      Op& n = emit(OpKind::qk_norm_backward, op.name + ".backward",
                   {d, value(op.inputs[0]), to_.weight(op.weights[0]), to_.weight(op.weights[1]), value(op.outputs[1])},
                   std::move(outputs));
      with_others(with(with(with_heads(n, s_), Attr::eps, s_.model.norm_eps), Attr::accumulate, accumulate_), op);
      gradient_of(op.inputs[0]) = d;
      return;
    }
    case OpKind::rope: {
      const Tensor d = gradient(op.outputs[0]);
      with_turn(with_turned(emit(OpKind::rope_backward, op.name + ".backward", {d, to_.positions()}, {d}), s_), op,
                s_.model);
      return;
    }
    case OpKind::latent_norm:
      return latent_norm(op);
    case OpKind::latent_attention:
      return latent_attention(op);
    case OpKind::attention: {
      const std::string in = "d_" + f_.value(op.inputs[0]).name, out = "d_" + f_.value(op.outputs[0]).name;
      const Tensor d_attended = by_heads(to_, s_, HeadsOf::attended, out, gradient(op.outputs[0]));
      if (!op.weights.empty() && s_.trains(op.weights[0].first)) sinks(op, d_attended);
      const Tensor d = make(op.inputs[0]), d_qkv = make_by_heads(to_, s_, HeadsOf::qkv, in, d);
      to_.attend_backward(in_attention(s_), op, d_attended, value(in_attention(f_, s_, op.inputs[0])),
                          value(in_attention(f_, s_, op.outputs[0])), value(op.outputs[1]), d_qkv);
      return by_tokens(to_, s_, HeadsOf::qkv, in, d_qkv, d);
    }
    case OpKind::swiglu:
    case OpKind::clamped_swiglu:
    case OpKind::geglu:
    case OpKind::gelu: {
      if (in_rounds(s_) && is_of_a_round(f_, op)) return;
      const Tensor d = make(op.inputs[0]);
      with_attrs(emit(backward_of_activation(op.kind), op.name + ".backward",
                      {gradient(op.outputs[0]), value(op.inputs[0])}, {d}),
                 op);
      return;
    }
    case OpKind::route:
      return route(op);
    case OpKind::expert_sort:
      return;
    case OpKind::dispatch:
      return dispatch(op);
    case OpKind::grouped_linear:
      return grouped_linear(op);
    case OpKind::combine:
      return combine(op);
    default:
      HB_CHECK(false, "a forward has no {}", name_of(op.kind));
  }
}

/// Of what attention left of its heads.
void BackwardWriter::sinks(const ForwardOp& op, const Tensor& d_attended) {
  Op& sinks =
      emit(OpKind::attention_sinks_backward, op.name + ".sinks.backward",
           {d_attended, value(in_attention(f_, s_, op.outputs[0])), value(op.outputs[1]), to_.weight(op.weights[0])},
           {to_.gradient(op.weights[0])});
  with(sinks, Attr::accumulate, accumulate_);
  if (s_.ulysses.ranks > 1) sinks.group = s_.ulysses.group;
}

Tensor BackwardWriter::make(ValueId id) {
  const ForwardValue& v = f_.value(id);
  return gradient_of(id) = make_value(to_, s_, v, "d_" + v.name, s_.compute);
}

BackwardWriter::Summands BackwardWriter::summands_of(ValueId id, bool of_block) {
  const auto known = summands_.find({id, of_block});
  if (known != summands_.end()) return {known->second, false};
  const std::string name = "d_" + f_.value(id).name;
  const Tensor dx = summands_.contains({id, !of_block}) ? gradient(id) : make(id);
  return {summands_[{id, of_block}] =
              of_block ? make_summands(to_, e_, name + ".block", dx) : make_summands(to_, s_, name, dx),
          true};
}

void BackwardWriter::added(ValueId id, const std::string& op, bool of_block) {
  if (--takers_.at({id, of_block}) > 0) return;
  const Tensor d = gradient(id), &summands = summands_.at({id, of_block});
  const auto of_experts = takers_.find({id, true});
  if (of_experts == takers_.end()) return sum_into_stream(to_, s_, op, summands, d);
  // What experts find is summed into the gradient; what else there is stands beside it until then.
  if (of_block) {
    sum_into_stream(to_, e_, op, summands, d);
  } else {
    beside_[id] = to_.make("d_" + f_.value(id).name + ".beside", d.dtype, {d.shape[0], d.shape[1]});
    sum_into_stream(to_, s_, op, summands, beside_[id]);
  }
  const auto waits = beside_.find(id);
  if (of_experts->second == 0 && waits != beside_.end())
    emit(OpKind::add, op + ".beside", {d, waits->second}, {d}), beside_.erase(waits);
}

void BackwardWriter::norm(const ForwardOp& op) {
  const ValueId sum = sum_of(op);
  const bool adds = is_there(gradients_, sum);
  const Tensor d_normed = gradient(op.outputs[0]), weight = to_.weight(op.weights[0]);
  const Tensor d_sum = adds ? gradient(sum) : make(sum);
  std::vector<Tensor> outputs = {d_sum};
  if (s_.trains(op.weights[0].first))
    for (const Weight& w : op.weights) outputs.push_back(to_.gradient(w));
  Op& n = emit(backward_of_norm(op.kind), op.name + ".backward", {d_normed, value(sum), weight, value(op.outputs[1])},
               std::move(outputs));
  with_others(with(with(n, Attr::residual, std::int64_t{adds ? 1 : 0}), Attr::accumulate, accumulate_), op);
  for (ValueId in : op.inputs) gradient_of(in) = d_sum;
}

void BackwardWriter::linear(const ForwardOp& op) {
  const ForwardValue &in = f_.value(op.inputs[0]), &out = f_.value(op.outputs[0]);
  const bool takes_stream = in.width == Width::hidden, leaves_stream = out.width == Width::hidden;
  const Tensor dy =
      leaves_stream ? all_tokens(to_, s_, "d_" + out.name, gradient(op.outputs[0])) : gradient(op.outputs[0]);
  const bool trains = s_.trains(op.weights[0].first), of_block = is_of_block(f_, s_, op);
  const std::vector<Tensor> d_down = through_adapters(op, dy);
  const auto of_weights = [&] {
    if (!trains && op.adapters.empty()) return;
    const Tensor kept = value(op.inputs[0]);
    const Tensor x = !takes_stream ? kept
                     : of_block    ? all_tokens(to_, e_, in.name + ".block.again", kept)
                                   : all_tokens(to_, s_, in.name + ".again", kept);
    of_adapters(op, x, dy, d_down);
    if (!trains) return;
    std::vector<Tensor> outputs;
    for (const Weight& w : op.weights) outputs.push_back(to_.gradient(w));
    with(emit(OpKind::linear_wgrad, op.name + ".wgrad", {dy, x}, std::move(outputs)), Attr::accumulate, accumulate_);
  };
  const auto of_input = [&] {
    const auto found = takes_stream ? summands_of(op.inputs[0], of_block) : Summands{make(op.inputs[0])};
    Op& d = emit(OpKind::linear_dgrad, op.name + ".dgrad", {dy, to_.weight(op.weights[0])}, {found.tensor});
    if (!found.first) with(d, Attr::accumulate, std::int64_t{1});
    add_of_adapters(op, d_down, found.tensor);
    if (takes_stream) added(op.inputs[0], op.name + ".dgrad", of_block);
  };
  // What a norm made is free before its gradient is there; but a sum over ranks is under way while the weights' turn
  // is computed.
  const bool weights_first = takes_stream && s_.tp.ranks == 1;
  if (weights_first) of_weights();
  of_input();
  if (!weights_first) of_weights();
}

void emit_forward(const Forward& f, const TensorSharding& s, Emitter& to, Values& values,
                  const std::vector<ValueId>* only) {
  values.resize(2 * f.values().size() + num_copy_ids);
  std::vector<bool> runs(f.ops().size(), only == nullptr);
  if (only) {
    std::set<ValueId> missing;
    for (ValueId id : *only)
      if (!is_there(values, id)) missing.insert(id);
    for (std::size_t i = f.ops().size(); i-- > 0;) {
      const ForwardOp& op = f.ops()[i];
      if (op.inputs == op.outputs) {  // in place: whoever makes the tensor again does this again
        runs[i] = missing.contains(op.outputs[0]);
        continue;
      }
      const std::vector<ValueId> results = results_of(f, s, op);
      runs[i] = std::ranges::any_of(results, [&](ValueId id) { return missing.contains(id); });
      if (!runs[i]) continue;
      for (ValueId id : results) missing.erase(id);
      if (is_norm(op.kind) && is_there(values, sum_of(op))) continue;  // from the sum
      if (op.kind == OpKind::attention && is_there(values, in_attention(f, s, op.inputs[0]))) continue;
      for (ValueId id : op.inputs)
        if (!is_there(values, id)) missing.insert(id);
    }
  }
  ForwardWriter writer(f, s, to, values);
  for (std::size_t i = 0; i < f.ops().size(); ++i)
    if (runs[i]) writer.write(f.ops()[i]);
}

void emit_backward(const Forward& f, const TensorSharding& s, BackwardEmitter& to, const Values& values,
                   Values& gradients, bool accumulate) {
  BackwardWriter writer(f, s, to, values, gradients, accumulate);
  for (std::size_t i = f.ops().size(); i-- > 0;) writer.write(f.ops()[i]);
}

}  // namespace hotbunk
