#include "shard/router_loss.h"

namespace hotbunk {

void add_router_loss(BackwardEmitter& to, const TensorSharding& s, const std::string& name,
                     const RouterLossFeeds& feeds, const Tensor& own_logits, const Tensor& own_experts,
                     const Tensor& d_own_logits) {
  const MoeSpec& moe = *s.model.moe;
  Tensor logits = own_logits, experts = own_experts, d_logits = d_own_logits;
  const bool in_blocks = s.blocks.count > 1;
  if (in_blocks) {
    const auto of_all = [&](const Tensor& own, const char* what) {
      const Tensor all = to.make(name + what, own.dtype, {s.tokens, own.shape[1]});
      to.emit(OpKind::all_gather, s.tp.stream, name + what, {own}, {all}).group = s.blocks.peers;
      return all;
    };
    logits = of_all(own_logits, ".logits.all_blocks"), experts = of_all(own_experts, ".experts.all_blocks");
    d_logits = to.make(name + ".d_logits.all_blocks", d_own_logits.dtype, {s.tokens, own_logits.shape[1]});
    to.emit(OpKind::zero, lead_stream, name + ".d_logits.zero", {}, {d_logits});
  }
  const Tensor counts =
      to.make(name + ".counts", DType::f32, {{feeds.num_sequences, fixed_extent, 0}, {moe.experts, fixed_extent, 0}});
  to.emit(OpKind::expert_counts, lead_stream, name + ".counts", {experts, feeds.sequence_ids}, {counts});
  const auto sum_over = [&](std::int64_t ranks, GroupId group, StreamId stream, const char* whom) {
    if (ranks > 1) to.emit(OpKind::all_reduce, stream, name + whom, {counts}, {counts}).group = group;
  };
  sum_over(s.context.ranks, s.context.group, s.context.stream, ".counts.all_context");
  sum_over(s.ulysses.ranks, s.ulysses.group, s.ulysses.stream, ".counts.all_ulysses");
  Op& loss = to.emit(OpKind::router_loss, lead_stream, name + ".loss",
                     {d_logits, logits, counts, feeds.sequence_ids, feeds.sequence_weights}, {d_logits, feeds.metrics});
  with(with(with(loss, Attr::factor, feeds.balance), Attr::z_factor, feeds.z), Attr::top_k, moe.experts_per_token);
  if (moe.sigmoid_scores) with(loss, Attr::sigmoid, std::int64_t{1});
  if (s.tp.ranks > 1) with(loss, Attr::tp, s.tp.ranks);
  if (!in_blocks) return;
  // All ranks of a place have found the same, each as its part of the group's sum.
  const Tensor own = to.make(name + ".d_logits.own", d_own_logits.dtype, {own_logits.shape[0], own_logits.shape[1]});
  to.emit(OpKind::reduce_scatter, s.tp.stream, name + ".d_logits.reduce_scatter", {d_logits}, {own}).group =
      s.blocks.peers;
  to.emit(OpKind::add, lead_stream, name + ".d_logits.add", {d_own_logits, own}, {d_own_logits});
}

}  // namespace hotbunk
