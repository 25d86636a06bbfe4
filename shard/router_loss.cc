#include "shard/router_loss.h"

namespace hotbunk {

void add_router_loss(BackwardEmitter& to, const TensorSharding& s, const std::string& name,
                     const RouterLossFeeds& feeds, const Tensor& logits, const Tensor& experts,
                     const Tensor& d_logits) {
  const MoeSpec& moe = *s.model.moe;
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
}

}  // namespace hotbunk
