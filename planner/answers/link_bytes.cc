#include "planner/answers/link_bytes.h"

#include <algorithm>

#include "planner/rl/engine_step.h"

namespace hotbunk {
namespace {

/// How a payload of one group divides among the links, given the wire bytes of its kind of collective.
class Splitter {
 public:
  Splitter(RlPhase phase, std::vector<LinkUse>& out) : phase_(phase), out_(out) {}

  void ring(std::string what, OpKind kind, const GroupShape& g, double payload) const {
    const RingBytes sent = ring_bytes(kind, g, payload);
    add(std::move(what), sent.node, sent.network);
  }
  void all_to_all(std::string what, const GroupShape& g, double sent) const {
    const double away =
        g.ranks > 1 ? static_cast<double>(g.ranks - g.per_node) / static_cast<double>(g.ranks - 1) : 0.0;
    add(std::move(what), sent * (1.0 - away), sent * away);
  }
  void point_to_point(std::string what, bool leaves, double sent) const {
    add(std::move(what), leaves ? 0.0 : sent, leaves ? sent : 0.0);
  }
  void host(std::string what, double bytes) const {
    if (bytes > 0) out_.push_back({phase_, std::move(what), 0.0, 0.0, bytes});
  }

 private:
  void add(std::string what, double node, double network) const {
    if (node + network > 0) out_.push_back({phase_, std::move(what), node, network, 0.0});
  }
  RlPhase phase_;
  std::vector<LinkUse>& out_;
};

/// What layers exchange in some passes over all micro-batches.
void add_layers(const TrainModel& model, const TrainPoint& p, const ForwardTraffic& t, double steps,
                const Splitter& split) {
  const RankGroups where = model.groups(p);
  // Gathers and scatters under SP, all-reduces without.
  split.ring(p.sp ? "tp gather and scatter" : "tp all-reduce", p.sp ? OpKind::all_gather : OpKind::all_reduce,
             where.tensor(), steps * t.tensor);
  split.all_to_all("expert dispatch and combine", where.expert(), steps * t.expert);
  if (p.cp > 1) split.point_to_point("cp ring", where.context().nodes > 1, steps * t.context);
  else if (p.ulysses > 1) split.all_to_all("ulysses", where.ulysses(), steps * t.context);
  split.point_to_point("pipeline", p.pp > 1 && where.pipeline_pair().nodes > 1, steps * t.pipeline);
  split.ring("tp gather behind a hop", OpKind::all_gather, where.tensor(), steps * t.arriving);
}

/// The optimizer steps of one model: the actor's, or PPO's critic.
void add_training(const TrainModel& model, const TrainPoint& p, const TrainPrice& t, double steps, RlPhase phase,
                  std::vector<LinkUse>& out) {
  const RankGroups where = model.groups(p);
  const GroupShape data = where.shard(), experts = where.expert_shard();
  const Splitter split(phase, out);
  add_layers(model, p, {t.tensor_payload, t.expert_payload, t.context_payload, t.pipeline_payload, t.arriving_payload},
             steps, split);
  const OpKind sum = p.sharding == Sharding::replicated ? OpKind::all_reduce : OpKind::reduce_scatter;
  split.ring("dp gradients", sum, data, steps * (t.data_reduce_payload - t.expert_data_reduce_payload));
  split.ring("experts' gradients", sum, experts, steps * t.expert_data_reduce_payload);
  // Each shard's gradients over the replicas of a hybrid layout.
  split.ring("replicas' gradients", OpKind::all_reduce, where.replicas(), steps * t.replica_payload);
  split.ring("experts' replicas' gradients", OpKind::all_reduce, where.expert_shard_replicas(),
             steps * t.expert_replica_payload);
  split.ring("dp parameters", OpKind::all_gather, data, steps * (t.data_gather_payload - t.expert_data_gather_payload));
  split.ring("experts' parameters", OpKind::all_gather, experts, steps * t.expert_data_gather_payload);
  if (p.reshard_ranks > 0)
    split.ring("parameters kept among few", OpKind::all_gather, where.among(p.reshard_ranks),
               steps * t.kept_gather_payload);
  split.all_to_all("optimizer's matrices", data, steps * t.optimizer_payload);
  split.host("parameters from the host", steps * t.host_up_bytes);
  split.host("gradients to the host", steps * t.host_down_bytes);
}

/// Forward passes that score samples, through training's layers: under ZeRO-3 and FSDP each gathers the parameters
/// once, where a step of training gathers them gathers_of_step() times. `l`: the actor's layers, `t`: the price of
/// whose parameters move.
void add_scoring(const RlModel& rl, const TrainPoint& p, const TrainModel::Layers& l, const TrainPrice& t,
                 RlPhase phase, std::vector<LinkUse>& out) {
  const RlSetting& s = rl.setting();
  const Splitter split(phase, out);
  if (phase == RlPhase::reference) split.host("reference from the host", rl.train_side(p, t, l).swapped_reference);
  const RlModel::Scoring by = rl.scoring(p, l, phase == RlPhase::values);
  const ForwardTraffic f = by.model->forward_traffic(by.point, by.layers);
  add_layers(rl.train(), p, f, s.mini_batches, split);
  if (!p.gathers_units()) return;
  const RankGroups where = rl.train().groups(p);
  const double once = s.mini_batches * static_cast<double>(by.point.micro_batches) / p.gathers_of_step();
  if (phase != RlPhase::reference) split.host("parameters from the host", once * t.host_up_bytes);
  split.ring("dp parameters", OpKind::all_gather, where.shard(),
             once * (t.data_gather_payload - t.expert_data_gather_payload));
  split.ring("experts' parameters", OpKind::all_gather, where.expert_shard(), once * t.expert_data_gather_payload);
}

/// What an engine's ranks exchange in all steps.
void add_generation(const RlModel& rl, const RolloutPoint& r, const RolloutPayload& sent, std::vector<LinkUse>& out) {
  const Splitter split(RlPhase::rollout, out);
  const EngineStep engine(rl, r);
  split.ring("tp all-reduce", OpKind::all_reduce, engine.group(r.tp), sent.reduce);
  split.ring("experts' all-reduce", OpKind::all_reduce, engine.group(r.tp * r.cp), sent.experts);
  split.all_to_all("expert dispatch and combine", engine.group(r.ep), sent.dispatch);
  split.point_to_point("pipeline", engine.leaves_node(), sent.pipeline);
  split.ring("tp gather behind a hop", OpKind::all_gather, engine.group(r.attention_tp()), sent.arriving);
  split.ring("cp keys and values", OpKind::all_gather, engine.group(r.cp, r.tp), sent.context_gather);
  split.ring("cp partial attention", OpKind::all_reduce, engine.group(r.cp, r.tp), sent.context_reduce);
}

/// What crosses the host link as the transition order says.
void add_shifts(const RlModel& rl, const RlPoint& p, const TrainPrice& t, const RolloutPrice& rollout,
                std::vector<LinkUse>& out) {
  const TrainSide side = rl.train_side(p.train, t, rl.train().layers(p.train));
  const ShiftPrice shift = price_shift(p.transition, rl.shift_bytes(p, side, rollout, 0.0));
  const double weights = rl.setting().keeps_weights ? rollout.weight_bytes : 0.0;
  const Splitter down(RlPhase::sleep, out), up(RlPhase::wake, out);
  down.host("training's state to the host", shift.down - weights);
  down.host("rollout's weights to the host", weights);
  up.host("and back", shift.up - weights);
  up.host("rollout's weights back", weights);
  if (shift.sync_from_host) Splitter(RlPhase::sync, out).host("parameters from their host copy", side.params);
}

}  // namespace

RingBytes ring_bytes(OpKind kind, const GroupShape& g, double payload) {
  const double wire = CostModel::wire_bytes(kind, g.ranks, payload);
  if (g.nodes <= 1) return {wire, 0.0};
  const double leaving = wire / static_cast<double>(g.per_node);
  return {wire - leaving, leaving};
}

std::vector<LinkUse> link_bytes(const RlModel& model, const RlPoint& p, const TrainPrice& train,
                                const RolloutPrice& rollout, bool iterate) {
  std::vector<LinkUse> out;
  const std::int64_t node = model.train().cost().ranks_per_node();
  if (iterate) {
    add_generation(model, p.rollout, rollout.sent, out);
    const SyncJob job = model.sync_job(p);
    const SyncPrice sync = price_sync(p.sync, job, model.train().cost());
    const Splitter move(RlPhase::sync, out);
    const GroupShape all = everyone(job, node), sources = GroupShape::strided(job.sources, 1, node);
    if (p.sync == SyncMechanism::shard_to_shard) {
      move.point_to_point("shards", all.nodes > 1, sync.bytes_sent);
    } else {
      const bool broadcast = p.sync == SyncMechanism::broadcast;
      if (!broadcast) move.ring("gathered buckets", OpKind::all_gather, sources, job.model_bytes);
      if (broadcast || job.apart > 0) move.ring("buckets to the engines", OpKind::broadcast, all, job.handed());
    }
    move.host("parameters from the host",
              model.train_side(p.train, train, model.train().layers(p.train)).streamed_source);
    if (p.placement == PlacementMode::colocated) add_shifts(model, p, train, rollout, out);
  }
  const RlSetting& s = model.setting();
  for (LinkUse& use : out) {
    if (use.phase != RlPhase::sync) continue;
    for (double* bytes : {&use.node_wire, &use.network_wire, &use.host_bytes}) *bytes /= s.sync_every;
  }
  const TrainModel::Layers l = model.train().layers(p.train);
  if (iterate && s.reference && !s.reference_apart) add_scoring(model, p.train, l, train, RlPhase::reference, out);
  if (iterate && s.old_logprobs) add_scoring(model, p.train, l, train, RlPhase::old_logprobs, out);
  if (iterate && s.critic && !s.critic_apart) {
    const TrainModel::Layers critic = model.critic_layers(p.train, l);
    const TrainPrice price = model.train().price(p.train, critic);
    add_scoring(model, p.train, l, price, RlPhase::values, out);
    add_training(model.train(), p.train, price, s.mini_batches, RlPhase::critic, out);
  }
  add_training(model.train(), p.train, train, s.mini_batches, RlPhase::train, out);
  return out;
}

}  // namespace hotbunk
