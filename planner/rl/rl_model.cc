#include "planner/rl/rl_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lowering/sample_rows.h"
#include "planner/rl/length_moments.h"
#include "spec/names.h"
#include "spec/pipeline_split.h"
#include "spec/shard_over.h"

namespace hotbunk {

std::string_view name_of(RlPhase p) {
  constexpr std::string_view names[] = {"rollout",      "sync",   "sleep",  "wake",  "reference",
                                        "old_logprobs", "values", "critic", "train", "framework"};
  return names[static_cast<std::size_t>(p)];
}

RlModel::RlModel(const TrainModel& train, RlSetting setting)
    : train_(train),
      setting_(std::move(setting)),
      counts_(counts_of(train.model())),
      product_peak_(train.cost().peak_flops(setting_.weights.products)),
      wide_peak_(train.cost().peak_flops(setting_.rollout_dtype)),
      counts_shards_(setting_.own_engine || setting_.direct ||
                     train.framework().can.has(train.framework().can.syncs, name_of(SyncMode::direct))),
      reshard_(new_reshard_cache(train.model())) {
  if (setting_.logprob_tokens > 0.0 || setting_.logprob_sequences > 0.0)
    scorer_ = train.with_micro_batches(setting_.logprob_tokens, setting_.logprob_sequences);
}

void RolloutPayload::raise_to(const RolloutPayload& o) {
  for (const auto part :
       {&RolloutPayload::reduce, &RolloutPayload::dispatch, &RolloutPayload::experts, &RolloutPayload::pipeline,
        &RolloutPayload::arriving, &RolloutPayload::context_gather, &RolloutPayload::context_reduce})
    this->*part = std::max(this->*part, o.*part);
}

RlModel::Scoring RlModel::scoring(const TrainPoint& p, const TrainModel::Layers& layers, bool critic) const {
  Scoring out{&train_, p, layers};
  if (scorer_) {
    out.model = &*scorer_, out.point = scorer_->cut(p);
    out.layers = scorer_->layers(out.point);
  }
  if (critic) out.layers = critic_layers(out.point, out.layers);
  return out;
}

ForwardSeconds RlModel::forward_seconds(const Scoring& by, bool trained) const {
  const TrainPoint& p = by.point;
  if (!trained && by.model->frozen() && !by.bare) {
    Scoring bare = by;
    bare.layers = TrainModel::without_adapters(by.layers), bare.bare = true;
    return forward_seconds(bare, false);
  }
  const TrainModel::Layers& l = by.layers;
  const auto m = p.full_micro_batches();
  const ScoringPass pass = by.model->scoring_pass(p, l);
  const PassPrice& one = pass.slowest;
  // Each stage receives, computes and sends, one behind the other; the last one gets an iteration's first micro-batch
  // through all of them.
  const double first = p.pp > 1 ? static_cast<double>(p.pp - 1) * by.model->hop(p, l).total() - pass.messages : 0.0;
  return {.compute = m * one.compute,
          .tensor = m * one.tensor,
          .expert = m * one.expert,
          .context = m * one.context,
          .bubble = (pass.all_stages - one.total()) / setting_.mini_batches,
          .gathers = by.model->exposed_gathers(p, l, one.total(), trained),
          .sends = m * pass.messages + first / setting_.mini_batches};
}

TrainSide RlModel::train_side(const TrainPoint& p, const TrainPrice& t, const TrainModel::Layers& l) const {
  if (!t.valid || !setting_.critic) return train_side(p, t, l, TrainPrice());
  const TrainModel::Layers critic = critic_layers(p, l);
  TrainSide out = train_side(p, t, l, train_.price(p, critic));
  // Actor and critic may be the fullest on different stages.
  if (p.pp > 1 && !setting_.critic_apart)
    out.total_bytes = train_.peak_of_both(p, l, critic) + t.overhead_bytes + out.reference;
  return out;
}

TrainSide RlModel::stage_side(const TrainPoint& p, const TrainModel::Layers& l, std::int64_t stage,
                              const TrainPrice& whole) const {
  const auto of = [&](const TrainModel::Layers& layers, const TrainPrice& all) {
    return train_.stage_price(p, layers, stage, all).held;
  };
  const TrainModel::Layers critic = critic_layers(p, l);
  return train_side(p, of(l, whole), l, setting_.critic ? of(critic, train_.price(p, critic)) : TrainPrice());
}

TrainSide RlModel::train_side(const TrainPoint& p, const TrainPrice& t, const TrainModel::Layers& l,
                              const TrainPrice& critic) const {
  TrainSide out;
  if (!t.valid) return out;
  const double passes = setting_.mini_batches;  // each prices micro_batches of one optimizer step
  out.train_seconds = passes * t.step_seconds;
  const Scoring by = scoring(p, l);
  if (setting_.old_logprobs) out.old_seconds = passes * forward_seconds(by, true).total() + driver_seconds();
  if (setting_.reference) out.reference_seconds = passes * forward_seconds(by, false).total();
  if (setting_.reference_apart)  // it works while the actor does: what it takes longer
    out.reference_seconds = std::max(0.0, out.reference_seconds - out.old_seconds);
  out.overhead_bytes = t.overhead_bytes;
  if (const FrameworkProfile& f = train_.framework(); f.rebuilds_communicators) {
    out.communicators = std::max(0.0, t.overhead_bytes - f.context_bytes.value);
    out.overhead_bytes -= out.communicators;
  }
  out.host_bytes = t.host_bytes;
  // What persists: the parameters that a sync reads, and beside them moments and separate master copies. A reference
  // model is held as the parameters are, in their dtype.
  const StateBytes& b = train_.setting().state;
  (p.streams_from_host() ? out.streamed_source : out.params) = t.source_bytes;
  out.optimizer = std::max(0.0, t.state_bytes - t.grad_bytes - t.source_bytes);
  out.total_bytes = t.total_bytes();
  if (setting_.critic) add_critic(p, l, critic, out);
  const double reference = t.source_bytes * (b.shard_is_master(p.sharding) ? b.params / std::max(b.master, 1e-9) : 1.0);
  const FrameworkProfile& frame = train_.framework();
  out.host_copies = frame.host_weight_copies.value * reference;
  out.host_bytes += out.host_copies + frame.host_process_bytes.value;
  if (frame.sleeps_gradients) out.slept_gradients = t.grad_bytes;
  if (setting_.reference_apart) out.reference_work = 0;
  else if (reference_is_copy() && setting_.reference_on_device) out.reference = reference, out.total_bytes += reference;
  else if (reference_is_copy()) out.swapped_reference = reference, out.host_bytes += reference;
  add_scoring(by, out);
  return out;
}

/// Bytes that the log-prob passes work in.
void RlModel::add_scoring(const Scoring& by, TrainSide& out) const {
  if (!setting_.reference && !setting_.old_logprobs && !setting_.critic) return;
  const double actor = by.model->scoring_bytes(by.point, by.layers).total();
  if (setting_.reference && !setting_.reference_apart) out.reference_work = actor + out.swapped_reference;
  if (setting_.old_logprobs) out.old_work = actor;
  if (setting_.critic && !setting_.critic_apart)
    out.values_work = by.model->scoring_bytes(by.point, critic_layers(by.point, by.layers)).total();
}

TrainModel::Layers RlModel::critic_layers(const TrainPoint& p, const TrainModel::Layers& actor) const {
  TrainModel::Layers l = actor;
  const bool tied = train_.model().tie_embeddings && p.pp == 1;  // end_parameters() counts such a pair once
  l.head = {.parameters = tied ? actor.head.parameters : static_cast<double>(train_.model().hidden)};
  return l;
}

/// The critic is sharded and trained as the actor is. Both models' states stay side by side while either trains;
/// gradients and activations are of one at a time. On GPUs of its own it works while the actor does: of its seconds
/// those count by which it takes longer, and the fuller of both kinds of GPUs is what has to fit.
void RlModel::add_critic(const TrainPoint& p, const TrainModel::Layers& actor, const TrainPrice& t,
                         TrainSide& out) const {
  out.values_seconds = setting_.mini_batches * forward_seconds(scoring(p, actor, true), true).total();
  out.critic_seconds = setting_.mini_batches * t.step_seconds;
  if (setting_.critic_apart) {
    out.values_seconds = std::max(0.0, out.values_seconds - out.old_seconds - out.reference_seconds);
    out.critic_seconds = std::max(0.0, out.critic_seconds - out.train_seconds);
    out.total_bytes = std::max(out.total_bytes, t.total_bytes());
    return;
  }
  out.critic = t.state_bytes - t.grad_bytes;
  out.total_bytes = std::max(out.total_bytes + out.critic, t.total_bytes() + out.params + out.optimizer);
  out.host_bytes += t.host_bytes;
}

/// `mapped`: taken (`kind` map) or given back (unmap) on the device. Our arena maps the host's side as well, the other
/// way round; others keep their pinned pools.
ShiftSeconds RlModel::shift_seconds(double copied, double mapped, OpKind kind) const {
  const CostModel& cost = train_.cost();
  ShiftSeconds out;
  if (mapped > 0.0) out.device = cost.map_seconds(mapped, kind);
  if (copied > 0.0) out.copies = cost.host_copy_seconds(copied);
  if (copied > 0.0 && setting_.own_engine)
    out.host = cost.map_seconds(copied, kind == OpKind::map ? OpKind::unmap : OpKind::map, Space::host);
  return out;
}

ShiftBytes RlModel::shift_bytes(const RlPoint& p, const TrainSide& train, const RolloutPrice& rollout,
                                double staging) const {
  return {.params = train.params,
          .optimizer = train.optimizer + train.critic + train.reference,
          .weights = rollout.weight_bytes,
          .kv = rollout.pool_bytes,
          .communicators = train.communicators,
          .graphs = sleeping_graphs(),
          .keeps_weights = setting_.keeps_weights,
          .staging = staging,
          .host_staging = std::min(p.bucket_bytes, train.params)};
}

/// Where something sleeps, what steps work in is given back too: one section of sync, engine and training.
ShiftsSeconds RlModel::shifts_seconds(const RolloutPoint& r, const ShiftShape& shape, const ShiftPrice& shift,
                                      const ShiftBytes& held, const TrainSide& train,
                                      const RolloutPrice& rollout) const {
  const CostModel& cost = train_.cost();
  WorkMoves work;
  if (shift.mapped > 0.0) {
    const double training = std::max(0.0, train.total_bytes - train.persistent());
    work = setting_.own_engine ? shape.moves({held.staging, rollout.activation_bytes, training, training, training})
                               : shape.moves({.sync = shift.sync_from_host ? held.staged_from_host() : held.staging,
                                              .rollout = rollout.activation_bytes + engine_overhead(r),
                                              .reference = train.reference_work,
                                              .old_logprobs = train.old_work,
                                              .train = std::max(training, train.values_work)},
                                             WorkPlan::priced);
  }
  const auto more = [&](double moved, OpKind kind) { return moved > 0.0 ? cost.map_seconds(moved, kind) : 0.0; };
  ShiftsSeconds out{.sleep = shift_seconds(shift.down, shift.unmapped + work.sleep.unmapped, OpKind::unmap),
                    .wake = shift_seconds(shift.up, shift.mapped + work.wake.mapped, OpKind::map)};
  out.sleep.device += more(work.sleep.mapped, OpKind::map);
  out.wake.device += more(work.wake.unmapped, OpKind::unmap);
  out.staging = (more(work.sync.mapped, OpKind::map) + more(work.sync.unmapped, OpKind::unmap)) / setting_.sync_every;
  if (shift.sync_from_host) out.uploads = cost.host_copy_seconds(train.params) / setting_.sync_every;
  return out;
}

/// Shifts on one set of GPUs.
void RlModel::colocate(const RlPoint& p, const ShiftShape& shape, const TrainSide& train, const RolloutPrice& rollout,
                       double staging, RlPrice& out) const {
  const auto at = [&](RlPhase phase) -> double& { return out.seconds[static_cast<std::size_t>(phase)]; };
  const ShiftBytes held = shift_bytes(p, train, rollout, staging);
  const ShiftPrice shift = shape.price(held);
  const ShiftsSeconds seconds = shifts_seconds(p.rollout, shape, shift, held, train, rollout);
  at(RlPhase::sleep) = seconds.sleep.total();
  at(RlPhase::wake) = seconds.wake.total();
  at(RlPhase::sync) += seconds.staging + seconds.uploads;
  const double overhead = train.overhead_bytes;
  out.train_bytes = train.fullest_bytes() + shift.train_rest;
  out.rollout_bytes = rollout.weight_bytes + rollout.pool_bytes + rollout.activation_bytes + shift.rollout_rest +
                      overhead + engine_overhead(p.rollout) + held.graphs;
  out.sync_bytes = shift.sync_bytes + overhead;
  out.wake_bytes = shift.wake_bytes + overhead;
  out.host_bytes = host_bytes(p, train, rollout, shift);
}

double RlModel::loading_bytes(const RlPoint& p, const RolloutPrice& rollout) const {
  const FrameworkProfile& frame = train_.framework();
  const bool sleeps =
      frame.engine_first && setting_.keeps_weights && p.placement == PlacementMode::colocated && p.samples();
  return frame.host_process_bytes.value +
         frame.load_copies.value * counts_.parameters * train_.setting().element_bytes +
         (sleeps ? rollout.weight_bytes + rollout.pinned_bytes : 0.0);
}

/// What sleeps keeps its place on the host, so that the fullest moment has all of it; models are loaded before anything
/// sleeps.
double RlModel::host_bytes(const RlPoint& p, const TrainSide& train, const RolloutPrice& rollout,
                           const ShiftPrice& shift) const {
  return std::max(train.host_bytes + shift.asleep + rollout.pinned_bytes + (p.sleeps() ? train.slept_gradients : 0.0),
                  loading_bytes(p, rollout));
}

/// Two sets of GPUs: nothing sleeps, buckets cross the network, and both sides may run at the same time when sampling
/// weights may be one step old.
void RlModel::disaggregate(const RlPoint& p, const TrainSide& train, const RolloutPrice& rollout, double staging,
                           RlPrice& out) const {
  const double rollout_side = apart_bytes(p.rollout, rollout);
  out.train_bytes = train.fullest_bytes();
  out.rollout_bytes = rollout_side;
  out.sync_bytes = std::max(train.persistent(), rollout_side) + staging;
  out.host_bytes = std::max(train.host_bytes, loading_bytes(p, rollout));
  if (!setting_.overlaps) return;
  double training = 0.0;
  for (RlPhase phase : {RlPhase::reference, RlPhase::old_logprobs, RlPhase::values, RlPhase::critic, RlPhase::train})
    training += out.seconds[static_cast<std::size_t>(phase)];
  out.overlapped = std::min(training, out.seconds[static_cast<std::size_t>(RlPhase::rollout)]);
}

double RlModel::staging_bytes(const RlPoint& p, const SyncPrice& sync) const {
  if (sync.peak_bytes <= 0.0 || p.placement != PlacementMode::colocated) return sync.peak_bytes;
  const double part = setting_.stages_part ? 1.0 / static_cast<double>(p.train.ranks()) : 0.0;
  const double whole = setting_.stages_part && p.train.ranks() == 1 ? 0.0 : setting_.staged_buckets;  // its own part
  return sync.peak_bytes * (whole + part) / 2.0;
}

RlPrice RlModel::combine(const RlPoint& p, const ShiftShape& shape, const TrainSide& train, const RolloutPrice& rollout,
                         const SyncPrice& sync) const {
  RlPrice out;
  if (train.train_seconds <= 0.0) return out;
  const auto at = [&](RlPhase phase) -> double& { return out.seconds[static_cast<std::size_t>(phase)]; };
  const double staging = staging_bytes(p, sync);
  at(RlPhase::rollout) = rollout.seconds();
  at(RlPhase::sync) = (sync.seconds() + train_.cost().node_copy_seconds(train.streamed_source)) / setting_.sync_every;
  at(RlPhase::reference) = train.reference_seconds;
  if (train.swapped_reference > 0.0) at(RlPhase::reference) += train_.cost().host_copy_seconds(train.swapped_reference);
  at(RlPhase::old_logprobs) = train.old_seconds;
  at(RlPhase::values) = train.values_seconds;
  at(RlPhase::critic) = train.critic_seconds;
  at(RlPhase::train) = train.train_seconds;
  at(RlPhase::framework) = framework_seconds();
  if (p.placement == PlacementMode::colocated) colocate(p, shape, train, rollout, staging, out);
  else disaggregate(p, train, rollout, staging, out);
  if (!rollout.fits) out.rollout_bytes = std::max(out.rollout_bytes, setting_.device_bytes + rollout.lacking_bytes);
  for (double s : out.seconds) out.iteration_seconds += s;
  out.iteration_seconds -= out.overlapped;
  out.fits = out.peak_bytes() <= setting_.device_bytes && out.host_bytes <= setting_.host_bytes;
  return out;
}

RlModel::Parts RlModel::parts(const RlPoint& p) const {
  const TrainModel::Layers l = train_.layers(p.train);
  const RolloutPrice alone = price_rollout(p.rollout);
  if (!alone.fits) return {};
  const TrainSide train = train_side(p.train, train_.price(p.train, l), l);
  return {train, rollout_beside(p.rollout, leftovers(p, ShiftShape(p.transition), train), alone), sync_price(p)};
}

RlPrice RlModel::price(const RlPoint& p) const {
  const Parts of = parts(p);
  return combine(p, ShiftShape(p.transition), of.train, of.rollout, of.sync);
}

void fill_shard_group(TrainLayout named, TrainPoint& p) {
  named.dp = p.dp, named.cp = p.cp, named.ulysses = p.ulysses;
  p.fsdp = named.shard_over.empty() ? named.fsdp : named.shard_ranks(), p.shard_over = {};
  if (!shard_groups_follow(named) && p.sharding != Sharding::replicated)
    p.shard_over = {named.shards_over("dp"), named.shards_over("cp"), named.shards_over("ulysses")};
  // The group of all data ranks has one name.
  if (p.sharding == Sharding::replicated || p.fsdp >= p.data_ranks()) p.fsdp = -1;
}

TrainLayout shard_group_of(const Capabilities& can, TrainLayout layout) {
  layout.fsdp = -1, layout.shard_over = fmt::format("{}", fmt::join(can.shards_over, "-"));
  return layout;
}

void take_shard_group(const Capabilities& can, const TrainLayout& layout, TrainPoint& p) {
  if (!can.shards_over.empty()) fill_shard_group(shard_group_of(can, layout), p);
}

TrainPoint train_point_of(const Scenario& s) {
  const TrainLayout& a = s.train.layout;
  TrainPoint p{.dp = a.dp,
               .cp = a.cp,
               .ulysses = a.ulysses,
               .tp = a.tp,
               .pp = a.pp,
               .vpp = a.vpp,
               .ep = a.ep,
               .etp = a.etp,
               .fsdp = a.fsdp,
               .sp = a.sp};
  switch (s.train.engine) {
    case TrainEngine::ddp:
      p.sharding = Sharding::replicated;
      break;
    case TrainEngine::zero1:
    case TrainEngine::megatron:
      p.sharding = Sharding::zero1;
      break;
    case TrainEngine::zero2:
      p.sharding = Sharding::zero2;
      break;
    case TrainEngine::fsdp1:
    case TrainEngine::fsdp2:
      p.sharding = Sharding::fsdp;
      break;
  }
  fill_shard_group(a, p);
  // One stage has nothing to order.
  if (p.pp > 1) p.schedule = schedule_named(s.train.pipeline_schedule);
  p.recompute = s.train.recompute;
  p.reshard_after_forward = s.train.reshard_after_forward, p.reshard_ranks = s.train.reshard_ranks;
  p.optimizer_on_host = s.train.offload == Offload::layerwise;
  p.optimizer = s.optimizer.name;
  fill_micro_batches(s, p);
  return p;
}

void fill_micro_batches(const Scenario& s, TrainPoint& p) {
  const auto sequence = static_cast<double>(train_setting_of(s).sequence);
  const double held = static_cast<double>(s.train.micro_batch_tokens) * static_cast<double>(p.cp * p.ulysses);
  // A billion sequences are more than any batch, and far from overflowing the products they enter.
  const double by_sequences =
      s.train.micro_batch_sequences > 0 ? static_cast<double>(s.train.micro_batch_sequences) : 1e9;
  p.micro_batch =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(held / sequence, by_sequences)), 1, 1'000'000'000);
  // Of the busiest data rank.
  const double each = static_cast<double>(num_samples(s)) /
                      static_cast<double>(std::max<std::int64_t>(s.algorithm.mini_batches, 1)) /
                      static_cast<double>(std::max<std::int64_t>(p.dp, 1));
  p.set_sequences(static_cast<std::int64_t>(std::ceil(std::min(each, 1e18))));
}

RolloutPoint rollout_point_of(const Scenario& s) {
  const RolloutLayout& l = s.rollout.layout;
  return {.tp = std::max<std::int64_t>(1, l.tp),
          .engines = std::max<std::int64_t>(1, l.dp),
          .strided = l.order == RankOrder::strided,
          .memory_fraction = s.rollout.memory_fraction,
          .ep = l.ep,
          .attention_dp = l.attention_dp,
          .cp = l.cp,
          .pp = l.pp};
}

/// Samples of a micro-batch beyond which its longest is taken to be that of so many.
constexpr int most_padded = 64;

TrainSetting train_setting_of(const Scenario& s) {
  // A sample is a prompt and its response, sampled or, in SFT, read (lowering/sample_rows.h).
  const LengthSpec &prompt = s.workload.prompt_tokens, &response = s.workload.response_tokens;
  const double mean = prompt.mean + response.mean;
  // E[L^2] of prompt and response together, drawn independently.
  const double square = mean_square(prompt) + 2.0 * prompt.mean * response.mean + mean_square(response);
  TrainSetting t;
  t.ragged = true;
  t.sequence = static_cast<std::int64_t>(std::ceil(std::max(mean, 1.0)));
  t.budget_tokens = static_cast<double>(s.train.micro_batch_tokens);
  t.loss_chunk = static_cast<double>(s.train.loss_chunk_tokens);
  // A token sees on average half of a sequence, and long sequences have more tokens: E[L (L + 1) / 2] / E[L].
  t.mean_keys = mean > 0.0 ? 0.5 * (square / mean + 1.0) : 0.0;
  t.longest = static_cast<double>(max_sample_tokens(s));
  t.length_variance = std::max(0.0, square - mean * mean);
  if (s.train.padding == Padding::micro_batch)
    for (int n = 1; n <= most_padded; ++n)
      t.longest_of.push_back(n == 1 ? mean : prompt.mean + longest_of(response, static_cast<double>(n)));
  if (s.train.padding == Padding::batch)  // whatever the micro-batch
    t.longest_of = {prompt.mean +
                    longest_of(response, static_cast<double>(s.algorithm.prompts * s.algorithm.samples_per_prompt))};
  t.budget_sequences = static_cast<double>(s.train.micro_batch_sequences);
  t.steps = static_cast<double>(std::max<std::int64_t>(s.algorithm.mini_batches, 1));
  t.precision =
      s.train.precision.gemm == "params" ? std::string(name_of(s.train.precision.params)) : s.train.precision.gemm;
  t.element_bytes = static_cast<double>(size_of(s.train.precision.params));
  t.state = {static_cast<double>(size_of(s.train.precision.params)),
             static_cast<double>(size_of(s.train.precision.grads)),
             static_cast<double>(size_of(s.train.precision.master)),
             2.0 * static_cast<double>(size_of(s.train.precision.moments))};
  t.order = axis_order(s.train.layout.order);
  t.momentum = s.optimizer.momentum > 0;
  t.cpu_optimizer = s.optimizer.cpu_fraction;
  t.pipeline_split = split_layers(s);
  t.prefetch = s.train.prefetch > 0;
  t.in_place_elements = static_cast<double>(s.train.in_place_elements);
  t.flat_parameters = s.train.engine == TrainEngine::fsdp1;
  t.context_exchange = s.train.context_exchange;
  return t;
}

RlSetting rl_setting_of(const Scenario& s) {
  RlSetting out;
  out.prompts = static_cast<double>(s.algorithm.prompts);
  out.samples = static_cast<double>(s.algorithm.samples_per_prompt);
  out.mini_batches = static_cast<double>(std::max<std::int64_t>(s.algorithm.mini_batches, 1));
  out.prompt_tokens = s.workload.prompt_tokens.mean;
  out.response_tokens = s.workload.response_tokens.mean;
  out.prompt_square = mean_square(s.workload.prompt_tokens);
  out.response_square = mean_square(s.workload.response_tokens);
  out.longest_prompt = std::max(s.workload.prompt_tokens.max, s.workload.prompt_tokens.mean);
  out.longest_response = std::max(s.workload.response_tokens.max, s.workload.response_tokens.mean);
  out.longest_sample = std::max(s.workload.longest(), 2.0);
  out.responses = s.workload.response_tokens;
  out.reference = s.algorithm.reference;
  out.old_logprobs = s.algorithm.old_logprobs;
  out.critic = s.algorithm.name == AlgorithmName::ppo;
  out.reference_apart = out.reference && s.algorithm.reference_placement == PlacementMode::disaggregated;
  out.critic_apart = out.critic && s.algorithm.critic_placement == PlacementMode::disaggregated;
  out.rollout_element_bytes = static_cast<double>(size_of(s.rollout.dtype));
  out.cache_element_bytes = static_cast<double>(size_of(s.rollout.kv_dtype()));
  out.engine = s.rollout.engine;
  out.eager = s.rollout.eager;
  out.rollout_dtype = s.rollout.dtype;
  out.weights = weight_format_of(s.rollout);
  out.max_prefill_tokens = static_cast<double>(s.rollout.max_prefill_tokens);
  out.max_running = static_cast<double>(s.rollout.max_running_requests);
  out.device_bytes = static_cast<double>(s.cluster.device_memory_bytes > 0 ? s.cluster.device_memory_bytes
                                                                           : s.cluster.gpu.memory_bytes);
  if (s.cluster.host_memory_bytes > 0)
    out.host_bytes = static_cast<double>(s.cluster.host_memory_bytes) /
                     static_cast<double>(std::max<std::int64_t>(s.cluster.ranks_per_node(), 1));
  const bool ours = s.rollout.engine == RolloutEngine::hotbunk;
  out.pool_by_need = ours;
  out.prefix_shared = !ours;  // our engine prefills every sample
  out.pool_tokens = static_cast<double>(s.rollout.kv_cache_tokens);
  // docs/sync-and-sleep.md: one part, and the gathered bucket unless peers read it. Others double their buckets.
  if (ours) out.staged_buckets = s.sync.transport == SyncTransport::ipc ? 0.0 : 1.0;
  out.stages_part = ours;
  out.own_engine = ours;
  out.sync_gathers = s.sync.transport == SyncTransport::collective;
  out.sync_verifies = s.sync.verify;
  out.direct = s.sync.mode == SyncMode::direct;
  out.keeps_weights = s.rollout.sleep && s.rollout.sleep_level == 1;
  out.reference_on_device = ours;
  out.price_per_gpu_hour = s.cluster.gpu.price_per_hour.value;
  out.overlaps = s.algorithm.max_staleness > 0;
  out.sync_every = static_cast<double>(s.sync.every);
  out.logprob_tokens = static_cast<double>(s.train.logprob_micro_batch_tokens);
  out.logprob_sequences = static_cast<double>(s.train.logprob_micro_batch_sequences);
  return out;
}

RlPoint rl_point_of(const Scenario& s) {
  if (s.algorithm.name == AlgorithmName::sft) return {.train = train_point_of(s), .rollout = {.engines = 0}};
  RlPoint p{.train = train_point_of(s),
            .rollout = rollout_point_of(s),
            .placement = s.placement,
            .sync = mechanism_of(s.sync, s.placement),
            .bucket_bytes = static_cast<double>(s.sync.bucket_bytes)};
  if (s.placement != PlacementMode::colocated) return p;
  // "auto" becomes the best order where the scenario is priced (ScenarioPricer::point).
  const std::string name = s.transition == "auto" ? "hotbunk" : s.transition;
  if (const auto order = transition_from(name, s.train.offload == Offload::sleep, s.rollout.sleep))
    p.transition = *order;
  return p;
}

}  // namespace hotbunk
