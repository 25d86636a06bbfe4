// Seconds of one optimizer step: the slowest stage's micro-batches, the bubble, data parallelism and the optimizer.
#include <algorithm>

#include "planner/train/train_model.h"

namespace hotbunk {

/// One micro-batch through one stage, forward and backward.
struct TrainModel::StageTime {
  double compute = 0, recompute = 0, tensor = 0, expert = 0, context = 0, host = 0, hidden = 0;
  double forward = 0, backward = 0;  // of the device, all included but waiting for the host
  double weight_grad = 0;            // part of backward that no other stage waits for
  double total() const { return compute + recompute + tensor + expert + context + host; }
};

/// What follows the passes on one stage: collectives over the data ranks and the optimizer, in seconds.
struct TrainModel::StepEnd {
  double exposed = 0, hidden = 0, optimizer = 0;
};

double TrainModel::launch_seconds() const {
  return framework_.launch_seconds.value > 0 ? framework_.launch_seconds.value : cost_.hardware().launch.value;
}

TrainModel::StageTime TrainModel::stage_time(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  StageTime t;
  double kernels = 0.0;
  // The first micro-batch of a step finds nothing to add its gradients to.
  const double adds = 1.0 - 1.0 / static_cast<double>(std::max<std::int64_t>(p.micro_batches, 1));
  const auto add = [&](const LayerCost& c, double count) {
    const double hidden = framework_.overlap_tensor ? c.hidden_tensor : 0.0;
    double recompute = 0.0;
    if (p.recompute == Recompute::full) recompute = c.recompute_layer;
    if (p.recompute == Recompute::selective) recompute = c.recompute_core;
    const bool full = p.recompute == Recompute::full, some = p.recompute == Recompute::selective;
    t.compute += count * (c.forward + c.backward + c.accumulate * adds);
    t.recompute += count * recompute;
    t.tensor += count * (c.tensor_forward * (full ? 2.0 : 1.0) + c.tensor_backward - hidden +
                         (some ? c.recompute_tensor : 0.0));
    t.expert += count * (c.expert_forward * (full ? 2.0 : 1.0) + c.expert_backward + (some ? c.recompute_expert : 0.0));
    t.context +=
        count * (c.context_forward * (full ? 2.0 : 1.0) + c.context_backward + (some ? c.recompute_context : 0.0));
    t.hidden += count * (hidden + c.hidden_expert);
    t.forward += count * (c.forward + c.tensor_forward + c.expert_forward + c.context_forward);
    t.weight_grad += count * c.weight_grad;
    kernels +=
        count * (c.kernels_forward * (full ? 2.0 : 1.0) + c.kernels_backward + (some ? c.recompute_kernels : 0.0));
  };
  const StageLayers layers = stage_layers(p, stage);
  add(l.dense, static_cast<double>(layers.dense));
  add(l.moe, static_cast<double>(layers.moe));
  // The ends are not recomputed.
  const auto end = [&](const LayerCost& c) {
    t.compute += c.forward + c.backward + c.accumulate * adds;
    t.tensor += c.tensor_forward + c.tensor_backward - (framework_.overlap_tensor ? c.hidden_tensor : 0.0);
    t.forward += c.forward + c.tensor_forward;
    kernels += c.kernels_forward + c.kernels_backward;
  };
  if (stage == 0) end(l.embedding);
  if (stage == p.pp - 1) end(l.head);
  t.compute += t.hidden * cost_.hardware().overlap_slowdown.value;
  // The host runs ahead of the device; when it cannot, it sets the pace.
  const double device = t.total();
  t.host = std::max(0.0, kernels * launch_seconds() - device);
  t.backward = device - t.forward;
  return t;
}

TrainModel::DataSeconds TrainModel::data_seconds(const TrainPoint& p, const StageShare& held) const {
  const StateBytes& b = setting_.state;
  const RankGroups where = groups(p);
  const double ordinary = held.ordinary * b.grads, expert = held.expert * b.grads;
  DataSeconds out;
  if (p.sharding == Sharding::replicated) {
    out.reduce = cost_.collective_seconds(OpKind::all_reduce, where.data(), ordinary) +
                 (expert > 0 ? cost_.collective_seconds(OpKind::all_reduce, where.expert_replicas(), expert) : 0.0);
    return out;
  }
  // One collective per unit or tensor where parameters or gradients stream, a few large buckets elsewhere.
  const bool streams = p.gathers_units();
  const bool each_pass = streams || p.sharding == Sharding::zero2;
  const double calls = each_pass ? std::max(1.0, held.layers() * framework_.unit_tensors.value) : 1.0,
               slower = 1.0 / std::max(framework_.data_rate.value, 1e-3);
  const auto both = [&](OpKind kind, const GroupShape& dense, double bytes, const GroupShape& sparse,
                        double expert_bytes) {
    const double each = slower / calls;
    return calls * (cost_.collective_seconds(kind, dense, bytes * each) +
                    (expert_bytes > 0 ? cost_.collective_seconds(kind, sparse, expert_bytes * each) : 0.0));
  };
  const double listing =
      each_pass ? calls * framework_.rank_launches.value * static_cast<double>(p.shard_ranks()) * launch_seconds()
                : 0.0;
  const GroupShape group = where.shard(), experts = where.expert_shard();
  const auto m = static_cast<double>(p.micro_batches);
  out.reduce = listing + both(OpKind::reduce_scatter, group, ordinary, experts, expert);
  out.gather = listing + both(OpKind::all_gather, group, held.ordinary * b.params, experts, held.expert * b.params);
  if (streams) out.gather *= m * (p.reshard_after_forward ? 2.0 : 1.0);
  // Every reduced shard is summed over the replicas at once, as FSDP does after each backward pass.
  if (p.replicas() > 1)
    out.reduce += both(OpKind::all_reduce, where.replicas(), ordinary / static_cast<double>(p.shard_ranks()),
                       where.expert_shard_replicas(), expert / static_cast<double>(p.expert_shard_ranks()));
  if (each_pass) out.reduce *= m;
  return out;
}

TrainModel::StepEnd TrainModel::step_end(const TrainPoint& p, const StageShare& held, double backward,
                                         double forward) const {
  auto [reduce, gather] = data_seconds(p, held);
  // Backward passes of full length that reduce gradients.
  const bool each_pass = p.sharding != Sharding::replicated && p.sharding != Sharding::zero1;
  double passes = each_pass ? p.full_micro_batches() : 1.0;
  double blocked = 0.0;
  if (p.streams_from_host()) {
    const HostPass host = host_pass(p, held);
    const auto all = static_cast<double>(p.micro_batches), later = all - 1.0;
    gather += all * (p.reshard_after_forward ? 2.0 : 1.0) * host.up;
    // A gradient that is there already makes the copy down wait, and with it the launches of the next unit's backward:
    // from the second micro-batch on nothing hides a reduction.
    blocked = later * (reduce / all + host.down + host.add);
    reduce = reduce / all + host.down, passes = std::min(passes, 1.0);
  }
  // What runs beside the compute of the passes that need it; the first gather and the last reduction find nothing to
  // hide behind: one layer's share.
  const double count = std::max(1.0, held.layers());
  const bool streamed = p.gathers_units();
  const double behind_reduce = framework_.overlap_grad_reduce ? backward * passes : 0.0;
  const double behind_gather =
      framework_.overlap_param_gather
          ? (streamed ? (backward + forward) * p.full_micro_batches() - std::min(reduce, behind_reduce) : forward)
          : 0.0;
  const double hidden_reduce = std::min(reduce * (1.0 - 1.0 / count), behind_reduce);
  const double hidden_gather = std::min(gather * (1.0 - 1.0 / count), std::max(behind_gather, 0.0));
  StepEnd out{.hidden = hidden_reduce + hidden_gather};
  out.exposed = reduce + gather - out.hidden + blocked;

  out.optimizer = update_seconds(p, held);
  return out;
}

void TrainModel::price_data(const TrainPoint& p, const Layers& l, double backward, double forward,
                            TrainPrice& out) const {
  // The step is over when the last stage is. Of the stages only those can be it that hold more of either kind.
  StageShare most;
  bool any = false;
  StepEnd last;
  visit_stages(p, [&](std::int64_t stage, std::int64_t) {
    const StageShare held = stage_share(p, l, stage);
    if (any && held.ordinary <= most.ordinary && held.expert <= most.expert) return;
    StepEnd end = step_end(p, held, backward, forward);
    // Experts are not lowered.
    if (framework_.lowered_ops && held.expert == 0 && p.gathers_units()) {
      end.exposed = end.hidden = 0.0;
      p.visit_micro_batches([&](double count, double share) {
        const PassStreams s = pass_streams(p, l, share * forward, share * backward, share, true);
        end.exposed += count * (s.forward + s.backward), end.hidden += count * (s.all - s.forward - s.backward);
      });
    }
    if (!any || end.exposed + end.optimizer > last.exposed + last.optimizer) last = end, most = held, any = true;
  });
  // The two ends of a pipeline add up their gradients of a tied embedding when all else is done (Megatron-core,
  // finalize_model_grads).
  double ends = 0.0;
  if (p.pp > 1 && model_.tie_embeddings)
    ends = cost_.collective_seconds(
        OpKind::all_reduce, groups(p).pipeline_pair(),
        static_cast<double>(model_.vocab * model_.hidden) / static_cast<double>(p.tp) * setting_.state.grads);
  out.seconds[static_cast<std::size_t>(Term::data)] = last.exposed + ends;
  // While the device waits for data the host launches what follows.
  double& host = out.seconds[static_cast<std::size_t>(Term::host)];
  host = std::max(0.0, host - last.exposed);
  out.seconds[static_cast<std::size_t>(Term::optimizer)] = last.optimizer;
  out.seconds[static_cast<std::size_t>(Term::compute)] += last.hidden * cost_.hardware().overlap_slowdown.value;
  out.hidden_seconds += last.hidden;
}

void TrainModel::price_time(const TrainPoint& p, const Layers& l, TrainPrice& out) const {
  // What a micro-batch takes is as its tokens are, so a short last one counts in part.
  const double m = p.full_micro_batches(), v = static_cast<double>(p.vpp);
  StageTime slowest;
  double whole = 0.0;  // one micro-batch through all stages
  visit_stages(p, [&](std::int64_t stage, std::int64_t count) {
    const StageTime t = stage_time(p, l, stage);
    whole += static_cast<double>(count) * t.total();
    if (t.total() > slowest.total()) slowest = t;
  });
  const auto at = [&](Term t) -> double& { return out.seconds[static_cast<std::size_t>(t)]; };
  at(Term::compute) = m * slowest.compute;
  at(Term::recompute) = m * slowest.recompute;
  at(Term::tensor) = m * slowest.tensor;
  at(Term::expert) = m * slowest.expert;
  at(Term::context) = m * slowest.context;
  at(Term::host) = m * slowest.host;
  at(Term::bubble) = std::max(0.0, whole - slowest.total()) / v;
  // ZB-H1 (Qi et al., 2401.10241): weight gradients wait until a stage would idle, (p - 1)(F + B + W) becomes
  // (p - 1)(F + B - W).
  if (setting_.schedule == PipelineSchedule::zero_bubble)
    at(Term::bubble) = std::max(0.0, at(Term::bubble) - 2.0 * static_cast<double>(p.pp - 1) * slowest.weight_grad / v);
  out.hidden_seconds = m * slowest.hidden;
  if (p.pp > 1) {
    const RankGroups where = groups(p);
    // Without SP the TP ranks send disjoint parts and gather on the other side.
    const double bytes = l.dense.input_bytes / (p.sp ? 1.0 : static_cast<double>(p.tp));
    double hop = cost_.collective_seconds(OpKind::send, where.pipeline_pair(), bytes);
    if (!p.sp && p.tp > 1) hop += cost_.collective_seconds(OpKind::all_gather, where.tensor(), l.dense.input_bytes);
    // Beside the passes of other micro-batches only as much as these take.
    const double fill = 2.0 * static_cast<double>(p.pp - 1) * hop, sends = 2.0 * m * v * hop;
    at(Term::pipeline) = fill + (framework_.overlap_pipeline ? std::max(0.0, sends - m * slowest.total()) : sends);
  }
  price_data(p, l, slowest.backward, slowest.forward, out);
  for (double s : out.seconds) out.step_seconds += s;
}

}  // namespace hotbunk
