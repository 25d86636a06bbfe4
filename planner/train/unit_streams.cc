// What our lowering's sharded units cost beside compute (lowering/train_state.cc): each is cast, gathered and copied
// out on one stream, its gradients packed, scattered and added on another.
#include <algorithm>

#include "planner/train/train_model.h"

namespace hotbunk {

TrainModel::UnitSeconds TrainModel::unit_seconds(const TrainPoint& p, double elements, UnitPass of) const {
  const StateBytes& b = setting_.state;
  const std::int64_t shards = p.shard_ranks();
  const GroupShape group = groups(p).shard();
  const double own = elements / static_cast<double>(shards), kernel = cost_.hardware().kernel_overhead.value;
  const auto pass = [&](double bytes) { return cost_.memory_seconds(bytes) + kernel; };
  UnitSeconds out;
  // FSDP's one shard is the master copy; the reference is kept as it computes.
  const bool trained = of != UnitPass::reference;
  if (trained && p.sharding == Sharding::fsdp && b.master != b.params)
    out.gather_kernels += pass(own * (b.master + b.params));
  // Hybrid shards are summed over their replicas behind the scatter.
  const bool reduces = of == UnitPass::step;
  if (reduces && p.replicas() > 1)
    out.reduce = cost_.collective_seconds(OpKind::all_reduce, groups(p).replicas(), own * b.grads);
  const double tensors = tensors_ * elements / std::max(parameters_, 1.0);
  const HostPass host = trained && p.streams_from_host() ? host_pass(p, own, tensors) : HostPass{};
  const auto micro_batches = static_cast<double>(p.micro_batches);
  out.gather = host.up, out.reduce += host.down + host.add * (1.0 - 1.0 / micro_batches);
  if (shards == 1) return out;
  out.gather += cost_.collective_seconds(OpKind::all_gather, group, elements * b.params);
  out.gather_kernels += pass(2.0 * elements * b.params);
  if (!reduces) return out;
  out.reduce += cost_.collective_seconds(OpKind::reduce_scatter, group, elements * b.grads);
  out.reduce_kernels = pass(2.0 * elements * b.grads) + pass(3.0 * own * b.grads);
  return out;
}

TrainModel::UnitStreams TrainModel::unit_streams(const TrainPoint& p, const Layers& l, UnitPass of) const {
  const StageShare held = stage_share(p, l, 0);
  const double layers = std::max(1.0, held.layers()), ends = end_parameters(p, l, 0);
  return {.root = unit_seconds(p, ends, of),
          .layer = unit_seconds(p, (held.ordinary - ends) / layers, of),
          .layers = layers};
}

TrainModel::PassStreams TrainModel::pass_streams(const TrainPoint& p, const Layers& l, const UnitStreams& units,
                                                 double forward, double backward, double share) const {
  const auto& [root, layer, layers] = units;
  // A pass begins with the root and the two layers that may be whole at once, before there is anything to compute; the
  // others come while one computes, if that takes longer than their collective. Without prefetch none does: the layer
  // before lies where the next one goes.
  const double gather = layer.gather + layer.gather_kernels, first = setting_.prefetch ? std::min(2.0, layers) : layers;
  const auto beside = [&, &layer = layer, count = layers](double compute) {
    return first * gather + (count - first) * std::max(layer.gather_kernels, gather - std::max(0.0, compute) / count);
  };
  // The head runs before the first gather of backward and behind the last of forward.
  PassStreams out;
  out.forward = root.gather + root.gather_kernels + beside(forward - share * (l.embedding.forward + l.head.forward));
  out.all = root.gather + root.gather_kernels + layers * gather;
  if (backward <= 0.0) return out;
  // Transient memory is reused at once: a layer's first buffers lie where the gradients of the one before are still
  // being reduced, so reductions are waited for.
  out.backward = root.reduce + root.reduce_kernels + layers * (layer.reduce + layer.reduce_kernels);
  out.all += out.backward;
  if (p.reshard_after_forward)
    out.backward += beside(backward - share * (l.embedding.backward + l.head.backward)), out.all += layers * gather;
  return out;
}

double TrainModel::exposed_gathers(const TrainPoint& p, const Layers& l, double forward, bool trained) const {
  double exposed = 0.0;
  if (!p.gathers_units()) return exposed;
  if (framework_.lowered_ops) {
    const UnitStreams units = unit_streams(p, l, trained ? UnitPass::forward : UnitPass::reference);
    p.visit_micro_batches([&](double count, double share) {
      exposed += count * pass_streams(p, l, units, share * forward, 0.0, share).forward;
    });
    return exposed;
  }
  const bool from_host = trained && p.streams_from_host();
  if (p.shard_ranks() == 1 && !from_host) return exposed;
  const StageShare held = stage_share(p, l, 0);
  const double units = std::max(1.0, held.layers());
  double gather =
      units / std::max(framework_.data_rate.value, 1e-3) *
      cost_.collective_seconds(OpKind::all_gather, groups(p).shard(), held.ordinary * setting_.state.params / units);
  if (from_host) gather += host_pass(p, held).up;
  // Prefetched: the first unit finds nothing to hide behind.
  p.visit_micro_batches([&](double count, double share) {
    exposed += count * (framework_.overlap_param_gather && setting_.prefetch
                            ? std::max(gather / units, gather - share * forward)
                            : gather);
  });
  return exposed;
}

}  // namespace hotbunk
