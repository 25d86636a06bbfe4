// Seconds of one optimizer step: the slowest stage's micro-batches, the bubble, data parallelism and the optimizer.
#include <algorithm>
#include <cmath>
#include <limits>

#include "planner/train/schedule_time.h"
#include "planner/train/train_model.h"

namespace hotbunk {

/// One micro-batch through one stage, forward and backward.
struct TrainModel::StageTime {
  double compute = 0, recompute = 0, tensor = 0, expert = 0, context = 0, hidden = 0;
  PassPrice first;                                   // forward's part of them
  RingPrice ring, ring_again;                        // backward's, and of what it runs again
  double forward = 0, backward = 0;                  // of the device, all included
  double launches = 0;                               // what the host needs for them
  double weight_grad = 0, weight_grad_launches = 0;  // of backward and of launches: what no other stage waits for
  double device() const { return compute + recompute + tensor + expert + context; }
};

/// All micro-batches through all stages at one pace, the device's or the host's: every stage waits for the others once,
/// and the step takes as long as the stage that is through last.
class TrainModel::Pace {
 public:
  /// `deferred`: passes over weight gradients that wait until their stage would idle.
  Pace(double micro_batches, double chunks, double deferred)
      : micro_batches_(micro_batches), chunks_(chunks), deferred_(deferred) {}

  /// `count` stages that take `own` for a micro-batch.
  void add(double own, double weight_grad, double count) {
    all_ += count * own;
    longest_ = std::max(longest_, own);
    longest_wait_ = std::max(longest_wait_, own * (micro_batches_ - 1.0 / chunks_) - deferred_ * weight_grad);
  }
  /// When a stage is through.
  double through(double own, double weight_grad) const {
    return micro_batches_ * own + std::max(0.0, (all_ - own) / chunks_ - deferred_ * weight_grad);
  }
  double last() const { return std::max(micro_batches_ * longest_, all_ / chunks_ + longest_wait_); }

 private:
  double micro_batches_, chunks_, deferred_;
  double all_ = 0;  // one micro-batch through all stages
  double longest_ = 0, longest_wait_ = -std::numeric_limits<double>::infinity();
};

/// What follows the passes on one stage: collectives over the data ranks and the optimizer, in seconds.
struct TrainModel::StepEnd {
  double exposed = 0, hidden = 0, optimizer = 0;
};

/// When the step is over on one stage, and why.
struct TrainModel::StepOver {
  StageShare held;
  StageTime time;
  double passes = 0;
  StepEnd end;
  double sends = 0;  // between stages, exposed
  double over = -1;

  /// Whether the other stage cannot be later: it has no more to move and to step, and what less it computes exposes no
  /// more than the time by which its passes are over sooner.
  bool behind(const StepOver& other, double hiding) const {
    const double less = (time.forward - other.time.forward) + (time.backward - other.time.backward);
    return other.held.ordinary <= held.ordinary && other.held.expert <= held.expert &&
           other.held.adapters <= held.adapters && other.time.forward <= time.forward &&
           other.time.backward <= time.backward && passes - other.passes >= hiding * less && other.sends <= sends;
  }
};

double TrainModel::launch_seconds() const {
  return framework_.launch_seconds.value > 0 ? framework_.launch_seconds.value : cost_.hardware().launch.value;
}

TrainModel::StageTime TrainModel::stage_time(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  StageTime t;
  // The first micro-batch of a step finds nothing to add its gradients to.
  const double adds = 1.0 - 1.0 / static_cast<double>(std::max<std::int64_t>(p.micro_batches, 1));
  // Of the experts' exchanges: forward's run beside another micro-batch's backward and the other way round, which the
  // first forward pass and the last backward pass of a step do not find.
  const double paired = framework_.overlap_expert ? adds : 0.0;
  const auto add = [&](const LayerCost& c, double count) {
    const double hidden = framework_.overlap_tensor ? c.hidden_tensor : 0.0;
    const bool full = p.recompute == Recompute::full, some = p.recompute == Recompute::selective;
    const double recompute = full ? c.recompute_layer : some ? c.recompute_core : 0.0;
    const double backward = c.backward + c.accumulate * adds;
    const double sent = c.expert_forward, sent_back = c.expert_backward + (full   ? c.expert_forward
                                                                           : some ? c.recompute_expert
                                                                                  : 0.0);
    const double beside_backward = paired * std::min(sent, backward + recompute),
                 beside_forward = paired * std::min(sent_back, c.forward);
    const double exposed = sent - beside_backward;
    t.compute += count * (c.forward + backward);
    t.recompute += count * recompute;
    t.tensor += count * (c.tensor_forward * (full ? 2.0 : 1.0) + c.tensor_backward - hidden +
                         (some ? c.recompute_tensor : 0.0));
    t.expert += count * (exposed + sent_back - beside_forward);
    t.context +=
        count * (c.context_forward * (full ? 2.0 : 1.0) + c.context_backward + (some ? c.recompute_context : 0.0));
    t.hidden += count * (hidden + beside_backward + beside_forward);
    t.forward += count * (c.forward + c.tensor_forward + exposed + c.context_forward);
    t.first.compute += count * c.forward, t.first.tensor += count * c.tensor_forward;
    t.first.expert += count * exposed, t.first.context += count * c.context_forward;
    const auto add_ring = [&](RingPrice& ring, double messages, double attention) {
      if (messages > 0.0) ring.messages += count * messages, ring.attention += count * attention;
    };
    add_ring(t.first.ring, c.ring_forward, c.attention_forward);
    add_ring(t.ring, c.ring_backward, c.attention_backward);
    if (full || (some && c.context_again)) add_ring(t.ring_again, c.ring_forward, c.attention_forward);
    // Those that hide a collective are not put off.
    t.weight_grad += count * std::max(0.0, c.weight_grad - hidden);
    t.weight_grad_launches += count * c.weight_grad_kernels;
    t.launches +=
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
    t.first.compute += c.forward, t.first.tensor += c.tensor_forward;
    t.launches += c.kernels_forward + c.kernels_backward;
  };
  if (stage == 0) end(l.embedding);
  if (stage == p.pp - 1) end(l.head);
  t.compute += t.hidden * cost_.hardware().overlap_slowdown.value;
  t.backward = t.device() - t.forward;
  t.launches *= launch_seconds(), t.weight_grad_launches *= launch_seconds();
  return t;
}

TrainModel::DataSeconds TrainModel::data_seconds(const TrainPoint& p, const StageShare& held) const {
  const StateBytes& b = setting_.state;
  const RankGroups where = groups(p);
  const double trained = held.frozen ? held.adapters - held.expert_adapters : held.ordinary,
               trained_expert = held.frozen ? held.expert_adapters : held.expert;
  const double ordinary = trained * b.grads, expert = trained_expert * b.grads;
  DataSeconds out;
  if (p.sharding == Sharding::replicated) {
    out.reduce = cost_.collective_seconds(OpKind::all_reduce, where.data(), ordinary) +
                 (expert > 0 ? cost_.collective_seconds(OpKind::all_reduce, where.expert_replicas(), expert) : 0.0);
    return out;
  }
  // One collective per unit or tensor where parameters or gradients stream, a few large buckets elsewhere.
  const bool streams = p.gathers_units();
  const bool each_pass = streams || p.sharding == Sharding::zero2;
  // FSDP1's flat parameter is one tensor and is gathered and reduced in place.
  const bool flat = streams && setting_.flat_parameters;
  const double calls = each_pass ? std::max(1.0, held.layers() * (flat ? 1.0 : framework_.unit_tensors.value)) : 1.0,
               slower = 1.0 / std::max(framework_.data_rate.value, 1e-3);
  const auto both = [&](OpKind kind, const GroupShape& dense, double bytes, const GroupShape& sparse,
                        double expert_bytes) {
    const double each = slower / calls;
    return calls * (cost_.collective_seconds(kind, dense, bytes * each) +
                    (expert_bytes > 0 ? cost_.collective_seconds(kind, sparse, expert_bytes * each) : 0.0));
  };
  const double listing = each_pass && !flat ? calls * framework_.rank_launches.value *
                                                  static_cast<double>(p.shard_ranks()) * launch_seconds()
                                            : 0.0;
  const GroupShape group = where.shard(), experts = where.expert_shard();
  const auto m = static_cast<double>(p.micro_batches);
  out.reduce = listing + both(OpKind::reduce_scatter, group, ordinary, experts, expert);
  // Nobody gathers again what nothing changes, but where units stream.
  const double gathered = streams ? held.ordinary + held.adapters : trained;
  out.gather = listing + both(OpKind::all_gather, group, gathered * b.params, experts,
                              (streams ? held.expert : trained_expert) * b.params);
  if (streams) out.gather *= p.gathers_of_step();
  if (const double kept = (held.all() - held.ends + held.adapters) * b.params; streams && p.reshard_ranks > 0)
    out.gather += p.kept_gathers() * calls *
                  cost_.collective_seconds(OpKind::all_gather, where.among(p.reshard_ranks), kept * slower / calls);
  // Every reduced shard is summed over the replicas at once, as FSDP does after each backward pass.
  if (p.replicas() > 1)
    out.reduce += both(OpKind::all_reduce, where.replicas(), ordinary / static_cast<double>(p.shard_ranks()),
                       where.expert_shard_replicas(), expert / static_cast<double>(p.expert_shard_ranks()));
  // Our units are packed into padded shards and unpacked again (lowering/train_state.cc).
  if (framework_.lowered_ops && !streams && p.shard_ranks() > 1) {
    out.reduce += cost_.memory_seconds(2.0 * (ordinary + expert));
    out.gather += cost_.memory_seconds(2.0 * held.trained() * b.params + held.own_trained(p) * (b.master + b.params));
  }
  if (each_pass) out.reduce *= m;
  return out;
}

/// Passes of full length that collectives over the data ranks can hide behind.
double TrainModel::hiding_passes(const TrainPoint& p) {
  return p.sharding != Sharding::replicated && p.sharding != Sharding::zero1 ? p.full_micro_batches() : 1.0;
}

TrainModel::StepEnd TrainModel::step_end(const TrainPoint& p, const StageShare& held, double backward,
                                         double forward) const {
  auto [reduce, gather] = data_seconds(p, held);
  double passes = hiding_passes(p);
  double blocked = 0.0;
  if (p.streams_from_host()) {
    const HostPass host = host_pass(p, held);
    const auto all = static_cast<double>(p.micro_batches), later = all - 1.0;
    gather += p.gathers_of_step() * host.up;
    // A gradient that is there already makes the copy down wait, and with it the launches of the next unit's backward:
    // from the second micro-batch on nothing hides a reduction.
    blocked = later * (reduce / all + host.down + host.add);
    reduce = reduce / all + host.down, passes = std::min(passes, 1.0);
  }
  // What runs beside the compute of the passes that need it; the first gather and the last reduction find nothing to
  // hide behind: one layer's share.
  const double count = std::max(1.0, held.layers());
  const bool streamed = p.gathers_units();
  // Our plan sums gradients that are accumulated whole, and gathers whole parameters, in the step itself.
  const bool in_step = framework_.lowered_ops && !streamed;
  const double behind_reduce =
      framework_.overlap_grad_reduce && !(in_step && p.sharding != Sharding::zero2) ? backward * passes : 0.0;
  const double behind_gather =
      framework_.overlap_param_gather && (setting_.prefetch || !streamed) && !in_step
          ? (streamed ? (backward + forward) * p.full_micro_batches() - std::min(reduce, behind_reduce) : forward)
          : 0.0;
  const double hidden_reduce = std::min(reduce * (1.0 - 1.0 / count), behind_reduce);
  const double hidden_gather = std::min(gather * (1.0 - 1.0 / count), std::max(behind_gather, 0.0));
  StepEnd out{.hidden = hidden_reduce + hidden_gather};
  out.exposed = reduce + gather - out.hidden + blocked;

  out.optimizer = update_seconds(p, held);
  return out;
}

/// Where our lowering's units stream, their own account.
TrainModel::StepEnd TrainModel::stage_end(const TrainPoint& p, const Layers& l, const StageShare& held,
                                          const StageTime& t) const {
  StepEnd end = step_end(p, held, t.backward, t.forward);
  // Experts are not lowered.
  if (!framework_.lowered_ops || held.expert > 0 || !p.gathers_units()) return end;
  const UnitStreams units = unit_streams(p, l, UnitPass::step);
  // What micro-batches share is gathered before the first of them, with nothing beside.
  const bool before = p.holds_units() || p.shares_parts();
  end.exposed = before ? units.layers * (units.layer.gather + units.layer.gather_kernels + units.layer.keep) : 0.0;
  end.hidden = 0.0;
  p.visit_micro_batches([&](double count, double share) {
    const PassStreams s = pass_streams(p, l, units, share * t.forward, share * t.backward, share);
    end.exposed += count * (s.forward + s.backward), end.hidden += count * (s.all - s.forward - s.backward);
  });
  return end;
}

void TrainModel::price_time(const TrainPoint& p, const Layers& l, TrainPrice& out) const {
  // What a micro-batch takes is as its tokens are, so a short last one counts in part.
  const double m = p.full_micro_batches(), v = static_cast<double>(p.vpp);
  // ZB-H1 (Qi et al., 2401.10241): weight gradients wait until a stage would idle, (p - 1)(F + B + W) becomes
  // (p - 1)(F + B - W). No more of them can wait than there are.
  const bool defers = p.schedule == PipelineSchedule::zero_bubble && p.pp > 1;
  Pace device(m, v, defers ? std::min(2.0 * static_cast<double>(p.pp - 1) / v, m) : 0.0);
  Pace host = device;
  // Stages of an even pipeline are at most seven kinds (stage_breaks); of a written split, the first are kept.
  std::array<StageTime, 7> known;
  std::size_t kinds = 0;
  const Hop message = p.pp > 1 ? hop(p, l) : Hop{};
  std::vector<StagePasses> deferring;
  visit_stages(p, [&](std::int64_t stage, std::int64_t count) {
    const StageTime t = stage_time(p, l, stage);
    if (defers) {
      StagePasses passes{t.forward, t.backward - t.weight_grad, t.weight_grad};
      if (framework_.overlap_pipeline)
        passes.beside = std::min({message.seconds, passes.forward / v, passes.backward / v});
      deferring.insert(deferring.end(), static_cast<std::size_t>(count), passes);
    }
    device.add(t.device(), t.weight_grad, static_cast<double>(count));
    host.add(t.launches, t.weight_grad_launches, static_cast<double>(count));
    if (kinds < known.size()) known[kinds] = t;
    ++kinds;
  });
  // How many weight gradients can wait, and for what, the schedule's own row says; messages run beside them.
  const double full = m - static_cast<double>(p.micro_batches - 1);
  std::vector<double> through, with_messages;
  if (defers) {
    const Pipeline row{p.pp, p.vpp, p.schedule};
    with_messages = stages_through(row, deferring, p.micro_batches, full, message.total());
    for (StagePasses& passes : deferring) passes.beside = 0.0;
    through = stages_through(row, deferring, p.micro_batches, full);
  }
  const auto last_through = [](const std::vector<double>& of, std::int64_t stage, std::int64_t count) {
    const auto first = of.begin() + stage;
    return *std::max_element(first, first + count);
  };
  // The step is over when the last stage is: passes, what of its collectives nothing hides, its optimizer.
  const double launched = host.last(), slowdown = cost_.hardware().overlap_slowdown.value;
  const double ramp = 2.0 * static_cast<double>(p.pp - 1) * message.total(), sends = 2.0 * m * v * message.total();
  out.launched_seconds = launched;
  StepOver last;
  std::size_t kind = 0;
  visit_stages(p, [&](std::int64_t stage, std::int64_t count) {
    const StageTime t = kind < known.size() ? known[kind] : stage_time(p, l, stage);
    ++kind;
    StepOver now{.held = stage_share(p, l, stage),
                 .time = t,
                 .passes = defers ? last_through(through, stage, count) : device.through(t.device(), t.weight_grad),
                 .end = {},
                 .sends = ramp + sends};
    // Beside the passes of other micro-batches only as much as these take.
    if (framework_.overlap_pipeline) now.sends = ramp + std::max(0.0, sends - m * t.device());
    if (defers) now.sends = std::max(0.0, last_through(with_messages, stage, count) - now.passes);
    out.passes_seconds = std::max(out.passes_seconds, now.passes);
    if (kind > 1 && last.behind(now, hiding_passes(p))) return;
    now.end = stage_end(p, l, now.held, t);
    // The host runs ahead of the device, also while that waits for data; when it cannot, it sets the pace.
    now.over =
        std::max(now.passes + now.end.exposed, launched) + now.end.optimizer + slowdown * now.end.hidden + now.sends;
    const bool equal = std::abs(now.over - last.over) <= 1e-12 * now.over;  // but for rounding
    if (equal ? t.device() > last.time.device() : now.over > last.over) last = now;
  });
  const auto at = [&](Term t) -> double& { return out.seconds[static_cast<std::size_t>(t)]; };
  at(Term::compute) = m * last.time.compute + slowdown * last.end.hidden;
  at(Term::recompute) = m * last.time.recompute;
  at(Term::tensor) = m * last.time.tensor;
  at(Term::expert) = m * last.time.expert;
  at(Term::context) = m * last.time.context;
  at(Term::bubble) = last.passes - m * last.time.device();
  at(Term::data) = last.end.exposed + tied_ends_seconds(p);
  at(Term::optimizer) = last.end.optimizer;
  at(Term::host) = std::max(0.0, launched - last.passes - last.end.exposed);
  out.hidden_seconds = m * last.time.hidden + last.end.hidden;
  at(Term::pipeline) = last.sends;
  for (double s : out.seconds) out.step_seconds += s;
}

TrainModel::Hop TrainModel::hop(const TrainPoint& p, const Layers& l) const {
  const RankGroups where = groups(p);
  // Without SP the TP ranks send disjoint parts and gather on the other side.
  Hop out{.payload = l.dense.input_bytes / (p.sp ? 1.0 : static_cast<double>(p.tp))};
  out.seconds = cost_.collective_seconds(OpKind::send, where.pipeline_pair(), out.payload);
  if (p.sp || p.tp == 1) return out;
  out.gather_payload = l.dense.input_bytes;
  out.gather_seconds = cost_.collective_seconds(OpKind::all_gather, where.tensor(), out.gather_payload);
  return out;
}

PassPrice TrainModel::scoring_pass(const TrainPoint& p, const Layers& l, std::int64_t stage) const {
  const StageLayers n = stage_layers(p, stage);
  const auto dense = static_cast<double>(n.dense), moe = static_cast<double>(n.moe);
  const auto of = [&](double LayerCost::*part) {
    return l.dense.*part * dense + l.moe.*part * moe + (stage == 0 ? l.embedding.*part : 0.0) +
           (stage == p.pp - 1 ? l.head.*part : 0.0);
  };
  return {.compute = of(&LayerCost::forward),
          .tensor = of(&LayerCost::tensor_forward),
          .expert = of(&LayerCost::expert_forward),
          .context = of(&LayerCost::context_forward),
          .ring = of(&LayerCost::ring_forward) > 0.0
                      ? RingPrice{of(&LayerCost::ring_forward), of(&LayerCost::attention_forward)}
                      : RingPrice{},
          .ring_again = {},
          .payload = pass_traffic(p, l, stage)};
}

ScoringPass TrainModel::scoring_pass(const TrainPoint& p, const Layers& l) const {
  ScoringPass out;
  const Hop message = p.pp > 1 ? hop(p, l) : Hop{};
  visit_stages(p, [&](std::int64_t stage, std::int64_t count) {
    const PassPrice one = scoring_pass(p, l, stage);
    out.all_stages += static_cast<double>(count) * one.total();
    const double messages = (stage > 0 ? message.total() : 0.0) + (stage + 1 < p.pp ? message.seconds : 0.0);
    if (one.total() + messages > out.slowest.total() + out.messages) out.slowest = one, out.messages = messages;
  });
  return out;
}

StagePrice TrainModel::stage_price(const TrainPoint& p, const Layers& l, std::int64_t stage,
                                   const TrainPrice& whole) const {
  const StageTime t = stage_time(p, l, stage);
  const StageShare share = stage_share(p, l, stage);
  const StepEnd end = stage_end(p, l, share, t);
  StagePrice out{.forward = t.first,
                 .backward = {.compute = t.compute - t.first.compute,
                              .recompute = t.recompute,
                              .tensor = t.tensor - t.first.tensor,
                              .expert = t.expert - t.first.expert,
                              .context = t.context - t.first.context,
                              .ring = t.ring,
                              .ring_again = t.ring_again,
                              .payload = {}},
                 .weight_grad = t.weight_grad,
                 .data = end.exposed + tied_ends_seconds(p),
                 .optimizer = end.optimizer,
                 .host = std::max(0.0, whole.launched_seconds - whole.passes_seconds - end.exposed),
                 .slowed = cost_.hardware().overlap_slowdown.value * end.hidden,
                 .held = whole};
  out.held.peak_bytes = stage_bytes(p, l, stage, &out.held);
  stage_traffic(p, l, stage, out.held);
  const double m = p.full_micro_batches();
  ForwardTraffic& back = out.backward.payload;
  out.forward.payload = pass_traffic(p, l, stage);
  back.tensor = out.held.tensor_payload / m - out.forward.payload.tensor;
  back.expert = out.held.expert_payload / m - out.forward.payload.expert;
  back.context = out.held.context_payload / m - out.forward.payload.context;
  out.kept_bytes =
      (share.dense * kept_bytes(p, l.dense) + share.moe * kept_bytes(p, l.moe)) / static_cast<double>(p.vpp) +
      (stage == 0 ? l.embedding.kept_bytes / static_cast<double>(p.vpp) : 0.0);
  return out;
}

/// The two ends of a pipeline add up their gradients of a tied embedding when all else is done (Megatron-core,
/// finalize_model_grads).
double TrainModel::tied_ends_seconds(const TrainPoint& p) const {
  if (p.pp == 1 || !model_.tie_embeddings || frozen()) return 0.0;
  return cost_.collective_seconds(OpKind::all_reduce, groups(p).pipeline_pair(),
                                  vocab_rows(p) * static_cast<double>(model_.hidden) * setting_.state.grads);
}

}  // namespace hotbunk
