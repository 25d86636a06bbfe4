// What our lowering's sharded units cost beside compute (lowering/train_state.cc): each is cast, gathered and copied
// out on one stream, its gradients packed, scattered and added on another.
#include <algorithm>
#include <cmath>

#include "planner/train/train_model.h"

namespace hotbunk {

std::vector<TrainModel::Matrices> TrainModel::matrices_of(const ModelSpec& model, int layer) {
  std::vector<Matrices> out;
  for (const ParamSpec& p : parameters_of(model, [&](int l) { return l == layer; })) {
    if (p.layer != layer || (layer < 0 && p.role != ParamRole::embedding)) continue;
    const auto rows = static_cast<double>(p.shape.front()),
               cols = p.shape.size() > 1 ? static_cast<double>(p.shape.back()) : 1.0;
    const auto at = std::ranges::find_if(
        out, [&](const Matrices& m) { return m.rows == rows && m.cols == cols && m.expert == (p.expert >= 0); });
    if (at != out.end()) at->count += 1.0;
    else out.push_back({rows, cols, 1.0, p.expert >= 0});
  }
  return out;
}

/// Large parameters of which all ranks have as many rows lie in place (train.in_place_elements).
double TrainModel::copied_share(const TrainPoint& p, const std::vector<Matrices>& matrices) const {
  const double least = setting_.in_place_elements;
  if (!framework_.lowered_ops || least <= 0.0 || setting_.flat_parameters) return 1.0;
  const auto shards = static_cast<double>(p.shard_ranks()), cuts = static_cast<double>(p.tp);
  double all = 0.0, copied = 0.0;
  for (const Matrices& m : matrices) {
    const double elements = m.rows * m.cols / cuts;
    all += m.count * elements;
    const bool apart = m.expert && p.ep > 1, even = std::fmod(m.rows, shards) == 0.0;
    if (apart || !even || elements / shards < least) copied += m.count * elements;
  }
  return all > 0.0 ? copied / all : 1.0;
}

/// `elements` and, where these are frozen, their `adapters`, which are gathered behind them by a collective of their
/// own (docs/lora.md).
TrainModel::UnitSeconds TrainModel::unit_seconds(const TrainPoint& p, double elements, double adapters, double copied,
                                                 UnitPass of) const {
  if (frozen()) {
    UnitSeconds out = unit_seconds(p, Elements{elements, 0.0}, copied, of);
    if (adapters <= 0.0 || of == UnitPass::reference) return out;
    const UnitSeconds beside = unit_seconds(p, Elements{adapters, adapters}, 1.0, of);
    out.gather += beside.gather, out.gather_kernels += beside.gather_kernels;
    out.reduce += beside.reduce, out.reduce_kernels += beside.reduce_kernels;
    out.keep += beside.keep, out.again += beside.again;
    return out;
  }
  return unit_seconds(p, Elements{elements, elements}, copied, of);
}

TrainModel::UnitSeconds TrainModel::unit_seconds(const TrainPoint& p, const Elements& unit, double copied,
                                                 UnitPass of) const {
  const double elements = unit.all;
  const StateBytes& b = setting_.state;
  const std::int64_t shards = p.shard_ranks();
  const GroupShape group = groups(p).shard();
  const double own = elements / static_cast<double>(shards), kernel = cost_.hardware().kernel_overhead.value;
  const auto pass = [&](double bytes) { return cost_.memory_seconds(bytes) + kernel; };
  UnitSeconds out;
  // FSDP's one shard is the master copy; the reference is kept as it computes.
  const bool trained = of != UnitPass::reference;
  if (trained && unit.trained > 0.0 && b.shard_is_master(p.sharding) && b.master != b.params)
    out.gather_kernels += pass(own * (b.master + b.params));
  // Hybrid shards are summed over their replicas behind the scatter.
  const bool reduces = of == UnitPass::step && unit.trained > 0.0;
  if (reduces && p.replicas() > 1)
    out.reduce = cost_.collective_seconds(OpKind::all_reduce, groups(p).replicas(), own * b.grads);
  const double tensors = tensors_ * elements / std::max(parameters_, 1.0);
  const bool steps = unit.trained > 0.0;
  const HostPass host =
      trained && p.streams_from_host() ? host_pass(p, steps ? own : 0.0, steps ? 0.0 : own, tensors) : HostPass{};
  const auto micro_batches = static_cast<double>(p.micro_batches);
  out.gather = host.up;
  if (steps) out.reduce += host.down + host.add * (1.0 - 1.0 / micro_batches);
  if (shards == 1) return out;
  out.gather += cost_.collective_seconds(OpKind::all_gather, group, elements * b.params);
  if (copied > 0.0) out.gather_kernels += pass(2.0 * copied * elements * b.params);
  if (const auto few = static_cast<double>(p.reshard_ranks); of == UnitPass::step && few > 0.0) {
    out.keep = pass(2.0 * elements * b.params / few);
    out.again = cost_.collective_seconds(OpKind::all_gather, groups(p).among(p.reshard_ranks), elements * b.params);
  }
  if (!reduces) return out;
  out.reduce += cost_.collective_seconds(OpKind::reduce_scatter, group, elements * b.grads);
  if (copied > 0.0) out.reduce_kernels = pass(2.0 * copied * elements * b.grads);
  out.reduce_kernels += pass(3.0 * own * b.grads);
  return out;
}

TrainModel::UnitStreams TrainModel::unit_streams(const TrainPoint& p, const Layers& l, UnitPass of) const {
  const StageShare held = stage_share(p, l, 0);
  const double layers = std::max(1.0, held.layers()), ends = end_parameters(p, l, 0);
  const double head = p.pp == 1 && !model_.tie_embeddings && !setting_.flat_parameters ? l.head.parameters : 0.0;
  const double of_ends = copied_share(p, end_matrices_);
  return {.root = unit_seconds(p, ends - head, 0.0, of_ends, of),
          .head = head > 0.0 ? unit_seconds(p, head, 0.0, of_ends, of) : UnitSeconds{},
          .layer = unit_seconds(p, (held.ordinary - ends) / layers, held.adapters / layers,
                                copied_share(p, layer_matrices_), of),
          .layers = layers};
}

TrainModel::PassStreams TrainModel::pass_streams(const TrainPoint& p, const Layers& l, const UnitStreams& units,
                                                 double forward, double backward, double share) const {
  const auto& [root, head, layer, layers] = units;
  // Where micro-batches share what few ranks keep, those gather in every pass.
  const bool shared = backward > 0.0 && p.shares_parts();
  const double gather = shared ? layer.again : layer.gather + layer.gather_kernels,
               reduce = layer.reduce + layer.reduce_kernels, root_gather = root.gather + root.gather_kernels,
               root_reduce = root.reduce + root.reduce_kernels, head_gather = head.gather + head.gather_kernels,
               head_reduce = head.reduce + head.reduce_kernels;
  // Streams wait for what they need and for the slots that the lowering declares. Layers freed after forward are whole
  // two at a time: the next is gathered while one computes. With one slot (prefetch 0) it cannot be; where all of them
  // stay there is no limit.
  const bool limited = backward <= 0.0 || p.reshard_after_forward, ahead = setting_.prefetch || !limited;
  const double kernels = shared ? 0.0 : layer.gather_kernels, later = layers - 1.0;
  // What a layer waits longer than it computes: its collectives run beside compute, their kernels take the device from
  // it.
  const auto beside = [&](double taken, double stream, double compute) { return std::max(taken, stream - compute); };
  const double forward_layer = std::max(0.0, forward - share * (l.embedding.forward + l.head.forward)) / layers;
  PassStreams out;
  const bool held = backward > 0.0 && p.holds_units();
  // A pass begins with the root and a layer, before there is anything to compute.
  out.forward = root_gather;
  if (!held) out.forward += gather + later * (ahead ? beside(kernels, gather, forward_layer) : gather);
  // The head comes beside the last layer.
  out.forward += ahead ? beside(head.gather_kernels, head_gather, forward_layer) : head_gather;
  out.all = root_gather + head_gather + (held ? 0.0 : layers * gather);
  if (backward <= 0.0) return out;
  const double backward_layer = std::max(0.0, backward - share * (l.embedding.backward + l.head.backward)) / layers;
  // Gradients of one unit are reduced while the next one computes; the last ones and the root's find nothing beside.
  out.backward = reduce + root_reduce + beside(head.reduce_kernels, head_reduce, backward_layer);
  out.all += layers * reduce + root_reduce + head_reduce;
  if (!p.reshard_after_forward) {
    out.backward += later * beside(layer.reduce_kernels, reduce, backward_layer);
    return out;
  }
  // What few ranks have kept comes back as it is computed with, without a kernel.
  const bool few = p.reshard_ranks > 0;
  const double again = few ? layer.again : gather, again_kernels = few ? 0.0 : kernels;
  const double keep = shared ? 0.0 : layer.keep;
  out.forward += layers * keep;
  out.all += layers * (again + keep);
  out.backward +=
      beside(again_kernels, again, share * (l.head.forward + l.head.backward));  // the first, beside the head
  out.backward += later * (ahead ? beside(again_kernels + layer.reduce_kernels, std::max(again, reduce), backward_layer)
                                 : again + beside(layer.reduce_kernels, reduce, backward_layer + again));
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
      cost_.collective_seconds(OpKind::all_gather, groups(p).shard(),
                               (held.ordinary + (trained ? held.adapters : 0.0)) * setting_.state.params / units);
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
