// What a forward's ops leave, what of it their backward reads, and what is kept for it where modules are recomputed.
#include <algorithm>
#include <iterator>

#include "shard/expert_rounds.h"
#include "shard/ulysses.h"
#include "shard/writers.h"

namespace hotbunk {

std::vector<ValueId> results_of(const Forward& f, const TensorSharding& s, const ForwardOp& op) {
  std::vector<ValueId> out = op.outputs;
  if (op.kind == OpKind::attention && s.ulysses.ranks > 1)
    out.insert(out.end(), {in_attention(f, s, op.inputs[0]), in_attention(f, s, op.outputs[0])});
  if (op.kind == OpKind::latent_attention && s.ulysses.ranks > 1)
    out.insert(out.end(), {in_attention(f, s, op.outputs[2]), in_attention(f, s, op.outputs[0])});
  if (op.kind == OpKind::expert_sort && s.ep.ranks > 1)
    out.insert(out.end(), {sent_by_all(f, op), count_of_rows(f, op)});
  if (op.kind == OpKind::expert_sort && s.ep.copies()) std::ranges::copy(copy_ids(f).all(), std::back_inserter(out));
  return out;
}

namespace {

/// What an op's backward reads of its inputs and results.
std::vector<ValueId> reads_of_backward(const Forward& f, const TensorSharding& s, const ForwardOp& op) {
  if (in_rounds(s) && is_of_a_round(f, op)) return {};
  switch (op.kind) {
    case OpKind::rms_norm:
    case OpKind::layer_norm:
      return {sum_of(op), op.outputs[1]};
    case OpKind::linear:  // the gradient of its input asks for none of it
      if (!s.trains(op.weights[0].first) && op.adapters.empty()) return {};
      return {op.inputs[0]};
    case OpKind::swiglu:
    case OpKind::clamped_swiglu:
    case OpKind::geglu:
    case OpKind::gelu:
      return {op.inputs[0]};
    case OpKind::qk_norm:
      return {op.inputs[0], op.outputs[1]};
    case OpKind::attention:
      return {in_attention(f, s, op.inputs[0]), in_attention(f, s, op.outputs[0]), op.outputs[1]};
    case OpKind::latent_norm:
      return {op.inputs[0], op.outputs[2]};
    case OpKind::latent_attention: {
      std::vector<ValueId> out = {in_attention(f, s, op.outputs[0]), op.outputs[1], in_attention(f, s, op.outputs[2])};
      if (s.trains(op.weights[0].first) || !op.adapters.empty()) out.insert(out.begin(), op.inputs[1]);
      return out;
    }
    case OpKind::route:
      return {op.inputs[0], op.outputs[1]};
    case OpKind::dispatch:
      if (s.ep.copies()) {
        std::vector<ValueId> out = copy_ids(f).all();
        out.insert(out.end(), {sent_by_all(f, *sort_of(f)), count_of_rows(f, *sort_of(f))});
        return out;
      }
      if (s.ep.ranks > 1) return {op.inputs[1], sent_by_all(f, *sort_of(f)), count_of_rows(f, *sort_of(f))};
      return {op.inputs[1]};
    case OpKind::grouped_linear:  // as of a linear; where each expert's rows begin, both ask for
      if (in_rounds(s)) return {op.inputs[1], routed_ops(f).dispatch.outputs[0]};
      if (!s.trains(op.weights[0].first) && op.adapters.empty()) return {op.inputs[1]};
      return op.inputs;
    case OpKind::combine:
      return {op.inputs.begin(), op.inputs.begin() + 3};
    default:
      return {};  // embedding and rope read what is fed; a sort has no backward
  }
}

/// Of which modules an op is.
RecomputeModules modules_of(const Forward& f, const ForwardOp& op) {
  using M = RecomputeModule;
  switch (op.kind) {
    case OpKind::attention:
      return RecomputeModules(M::core_attn);
    case OpKind::latent_attention:  // one op makes packed heads of latents, and attends: both modules, or none
      return RecomputeModules(M::core_attn, M::mla_up_proj);
    case OpKind::route:
    case OpKind::expert_sort:
    case OpKind::grouped_linear:
    case OpKind::combine:
      return RecomputeModules(M::moe);
    case OpKind::dispatch:
      return RecomputeModules(M::moe, M::moe_act);
    default:
      if (is_norm(op.kind) || op.kind == OpKind::latent_norm) return RecomputeModules(M::layernorm);
  }
  const bool product = op.kind == OpKind::linear;
  switch (f.value(op.outputs[0]).width) {
    case Width::queries:
      return product ? RecomputeModules(M::mla_up_proj) : RecomputeModules();
    case Width::gate_up:
      return RecomputeModules(M::mlp);
    case Width::inner:  // of an MLP without a gate, a product's
      return product ? RecomputeModules(M::mlp) : RecomputeModules(M::mlp, M::mlp_act);
    case Width::experts:
    case Width::expert_gate_up:
      return RecomputeModules(M::moe);
    case Width::expert_inner:
      return RecomputeModules(M::moe, M::moe_act);
    case Width::shared_gate_up:
      return RecomputeModules(M::shared_experts, M::moe);
    case Width::shared_inner:
      return RecomputeModules(M::shared_experts, M::moe, M::mlp_act);
    default:
      return {};
  }
}

/// What an op leaves that goes when these modules are computed again.
std::vector<ValueId> dropped(const Forward& f, const TensorSharding& s, const ForwardOp& op, RecomputeModules modules) {
  if (!modules_of(f, op).meets(modules)) return {};
  std::vector<ValueId> out = results_of(f, s, op);
  if (is_norm(op.kind)) std::erase(out, sum_of(op));                                    // the residual stream
  if (op.kind == OpKind::attention) std::erase(out, in_attention(f, s, op.inputs[0]));  // q, k and v
  return out;
}

}  // namespace

std::vector<ValueId> read_by_backward(const Forward& f, const TensorSharding& s) {
  std::vector<ValueId> out;
  for (const ForwardOp& op : f.ops())
    for (ValueId id : reads_of_backward(f, s, op))
      if (!std::ranges::count(out, id)) out.push_back(id);
  return out;
}

std::vector<ValueId> kept_values(const Forward& f, const TensorSharding& s, Recompute recompute,
                                 RecomputeModules modules, ValueId entry) {
  if (recompute == Recompute::full) return {entry};
  std::vector<ValueId> kept = read_by_backward(f, s);
  if (recompute == Recompute::selective)
    for (const ForwardOp& op : f.ops())
      for (const ValueId id : dropped(f, s, op, modules)) std::erase(kept, id);
  return kept;
}

}  // namespace hotbunk
