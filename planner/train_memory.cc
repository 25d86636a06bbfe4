// Device bytes of one pipeline stage at its fullest moment, by category.
#include <algorithm>

#include "planner/train_model.h"

namespace hotbunk {
namespace {

/// Micro-batches (or, interleaved, chunks of 1/vpp of the stage's layers) whose activations a stage holds at once.
/// 1F1B: min(m, pp - stage). Interleaved 1F1B: warm-up of 2 (pp - stage - 1) + (vpp - 1) pp chunks and the current one.
double in_flight(const TrainPoint& p, std::int64_t stage) {
  if (p.pp == 1) return 1.0;
  if (p.vpp == 1) return static_cast<double>(std::min(p.micro_batches, p.pp - stage));
  const std::int64_t chunks = std::min(p.micro_batches * p.vpp, 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1);
  return static_cast<double>(chunks) / static_cast<double>(p.vpp);
}

struct States {
  double params = 0, grads = 0, optimizer = 0, gathered = 0;
};

/// Parameters, gradients and optimizer of `dense` + `expert` elements; experts are replicated over fewer ranks.
States states_of(const TrainPoint& p, const StateBytes& b, double dense, double expert, double unit) {
  const auto shard = static_cast<double>(p.shard_ranks());
  const auto expert_shard = std::max(1.0, shard * static_cast<double>(p.tp) / static_cast<double>(p.ep * p.etp));
  const double all = dense + expert, sharded = dense / shard + expert / expert_shard;
  States s;
  switch (p.sharding) {
    case Sharding::replicated:
      s = {all * b.params, all * b.grads, all * (b.master + b.moments), 0.0};
      break;
    case Sharding::zero1:
      s = {all * b.params, all * b.grads, sharded * (b.master + b.moments), 0.0};
      break;
    case Sharding::zero2:
      s = {all * b.params, sharded * b.grads, sharded * (b.master + b.moments), unit * b.grads};
      break;
    case Sharding::zero3:
      s = {sharded * b.params, sharded * b.grads, sharded * (b.master + b.moments), unit * (2.0 * b.params + b.grads)};
      break;
    case Sharding::fsdp:
      // One persistent shard in the master dtype; two units gathered at once, and the gradient of one.
      s = {0.0, sharded * b.grads, sharded * (b.master + b.moments), unit * 3.0 * b.params};
      if (!p.reshard_after_forward) s.gathered = all * b.params + unit * b.params;
      break;
  }
  if (p.optimizer_on_host) s.optimizer = 0.0;
  return s;
}

}  // namespace

double TrainModel::stage_bytes(const TrainPoint& p, const Layers& l, std::int64_t stage, TrainPrice* out) const {
  const bool first = stage == 0, last = stage == p.pp - 1;
  const auto dense = static_cast<double>(layers_of(p, stage, false)),
             moe = static_cast<double>(layers_of(p, stage, true));
  const double ends = end_parameters(p, l, stage);
  const double expert = moe * l.moe.expert_parameters;
  const double ordinary = dense * l.dense.parameters + moe * (l.moe.parameters - l.moe.expert_parameters) + ends;
  // The unit gathered around the peak, with its neighbour and its gradient (states_of): a layer, or at the loss the
  // root (embedding and head), which has no neighbour, hence two of the three copies.
  const double unit = std::max({l.dense.parameters, l.moe.parameters, 2.0 / 3.0 * (last ? ends : 0.0)});
  const States s = states_of(p, setting_.state, ordinary, expert, unit);

  const auto kept = [&](const LayerCost& c) {
    return p.recompute == Recompute::none        ? c.kept_bytes
           : p.recompute == Recompute::selective ? c.kept_selective_bytes
                                                 : c.input_bytes;
  };
  const double flight = in_flight(p, stage);
  double activations = flight * (dense * kept(l.dense) + moe * kept(l.moe));
  if (first) activations += flight * l.embedding.kept_bytes;
  if (last) activations += l.head.kept_bytes;
  // Full recomputation rebuilds one layer at a time, selective only the attention core.
  const LayerCost& widest = l.moe.kept_bytes > l.dense.kept_bytes ? l.moe : l.dense;
  double rebuilt = 0.0;
  if (p.recompute == Recompute::full) rebuilt = widest.kept_bytes;
  if (p.recompute == Recompute::selective) rebuilt = widest.kept_bytes - widest.kept_selective_bytes;
  // At the loss nothing is rebuilt yet; in the layers' backward the logits are gone.
  const double loss = last ? l.head.transient_bytes : 0.0;
  activations += std::max(loss, rebuilt + widest.transient_bytes);

  double workspace = framework_.workspace_bytes.value;
  if (framework_.dummy_weight_grads) {
    const double shapes = moe > 0 && dense > 0
                              ? l.dense.largest_weights + l.moe.largest_weights - l.moe.attention_weights
                          : moe > 0 ? l.moe.largest_weights
                                    : l.dense.largest_weights;
    workspace += setting_.state.params * shapes;
  }
  double communication = p.pp > 1 ? 2.0 * l.dense.input_bytes : 0.0;
  if (p.sp)
    communication += setting_.element_bytes * static_cast<double>(p.micro_batch * setting_.sequence) /
                     static_cast<double>(p.cp * p.ulysses) * static_cast<double>(model_.hidden);
  const double total = s.params + s.grads + s.optimizer + s.gathered + activations + workspace + communication;
  if (out) {
    const auto at = [&](Category c) -> double& { return out->bytes[static_cast<std::size_t>(c)]; };
    at(Category::params) = s.params + (p.sharding == Sharding::zero2 ? 0.0 : s.gathered);
    at(Category::grads) = s.grads + (p.sharding == Sharding::zero2 ? s.gathered : 0.0);
    at(Category::optimizer) = s.optimizer;
    at(Category::activations) = activations;
    at(Category::workspace) = workspace;
    at(Category::communication) = communication;
    out->state_bytes = s.params + s.grads + s.optimizer;
    out->activation_bytes = activations;
    out->host_bytes = p.optimizer_on_host ? (ordinary + expert) / static_cast<double>(p.shard_ranks()) *
                                                (setting_.state.master + setting_.state.moments + setting_.state.grads)
                                          : 0.0;
  }
  return total;
}

}  // namespace hotbunk
