#include "lowering/phases.h"

#include <algorithm>

namespace hotbunk {
namespace {

using enum TransitionStep;

PlanPhase phase_of(TransitionStep s, bool again) {
  switch (s) {
    case sleep_optimizer:
      return PlanPhase::sleep_optimizer;
    case sleep_train:
      return again ? PlanPhase::sleep_train_again : PlanPhase::sleep_train;
    case wake_params:
      return again ? PlanPhase::wake_params_again : PlanPhase::wake_params;
    case wake_rollout:
      return PlanPhase::wake_rollout;
    case sync:
      return PlanPhase::sync;
    case wake_kv:
      return PlanPhase::wake_kv;
    case rollout:
      return PlanPhase::rollout;
    case sleep_rollout:
      return PlanPhase::sleep_rollout;
    case wake_train:
      return PlanPhase::wake_train;
    case sleep_moments:
      return PlanPhase::sleep_moments;
    case sleep_reference:
      return PlanPhase::sleep_reference;
    case wake_moments:
      return PlanPhase::wake_moments;
    case wake_reference:
      return PlanPhase::wake_reference;
    case sleep_kv:
      return PlanPhase::sleep_kv;
    case sleep_weights:
      return PlanPhase::sleep_weights;
    case flush:
      return PlanPhase::flush;
    case reference:
      return PlanPhase::reference;
    case old_logprobs:
      return PlanPhase::old_logprobs;
  }
  return PlanPhase::count;
}

/// The parts that are on in `a` and off in `b`.
SleepParts without(const OnDevice& a, const OnDevice& b) {
  return {a.params && !b.params, a.moments && !b.moments, a.reference && !b.reference, a.weights && !b.weights,
          a.kv && !b.kv};
}

/// Behind the rollout, as long as nothing of training moves: the samples are exchanged where memory is free again.
bool may_precede_exchange(TransitionStep s) {
  return s == sleep_rollout || s == sleep_kv || s == sleep_weights || s == flush || s == sleep_train ||
         s == sleep_optimizer || s == sleep_moments || s == sleep_reference;
}

/// Whether a step is there for the sync alone, so that it is left out with it: the sync, and parameters that wake for
/// it and sleep again before the rollout.
bool of_the_sync(const TransitionOrder& order, const TransitionStep* at) {
  const TransitionStep* const synced = std::find(order.begin(), order.end(), sync);
  if (at == synced) return true;
  const TransitionStep* const sampled = std::find(synced, order.end(), rollout);
  const TransitionStep* const woken = std::find(order.begin(), synced, wake_params);
  const TransitionStep* const slept = std::find(synced, sampled, sleep_train);
  return woken != synced && slept != sampled && (at == woken || at == slept);
}

}  // namespace

std::string_view name_of(PlanPhase p) {
  constexpr std::array<std::string_view, num_plan_phases> names = {"load",
                                                                   "start_rollout",
                                                                   "sleep_optimizer",
                                                                   "sleep_moments",
                                                                   "sleep_reference",
                                                                   "wake_rollout",
                                                                   "wake_params",
                                                                   "wake_params_again",
                                                                   "sync",
                                                                   "sleep_train",
                                                                   "sleep_train_again",
                                                                   "flush",
                                                                   "wake_kv",
                                                                   "rollout",
                                                                   "sleep_rollout",
                                                                   "sleep_kv",
                                                                   "sleep_weights",
                                                                   "exchange",
                                                                   "samples",
                                                                   "wake_train",
                                                                   "wake_moments",
                                                                   "wake_reference",
                                                                   "wake_work",
                                                                   "framework",
                                                                   "reference",
                                                                   "old_logprobs",
                                                                   "values",
                                                                   "critic",
                                                                   "train",
                                                                   "checkpoint",
                                                                   "export"};
  return names[static_cast<std::size_t>(p)];
}

PlanPhase phase_named(std::string_view name) {
  std::size_t p = 0;
  while (p < num_plan_phases && name_of(static_cast<PlanPhase>(p)) != name) ++p;
  return static_cast<PlanPhase>(p);
}

PhaseInfo JobPhase::info() const { return {std::string(name_of(phase)), when_of(phase), is_driven(phase), every}; }

JobPhases::JobPhases(const Scenario& s) {
  const TransitionOrder order = transition_of(s);
  const bool samples = s.algorithm.name != AlgorithmName::sft;
  OnDevice state = start_of(order);
  for (TransitionStep step : order) {
    const OnDevice before = state;
    state.take(step);
    const SleepParts sleeps = without(before, state);
    sleepers_.params |= sleeps.params, sleepers_.moments |= sleeps.moments;
    sleepers_.reference |= sleeps.reference && has_reference_copy(s);
    sleepers_.weights |= samples && sleeps.weights, sleepers_.kv |= samples && sleeps.kv;
  }
  add({PlanPhase::load});
  if (samples) add_transition(s, order);
  if (samples && s.algorithm.reference && !has(PlanPhase::reference)) add({PlanPhase::reference});
  if (samples && s.algorithm.old_logprobs && !has(PlanPhase::old_logprobs)) add({PlanPhase::old_logprobs});
  for (PlanPhase p : {PlanPhase::train, PlanPhase::checkpoint, PlanPhase::export_}) add({p});
}

void JobPhases::add_transition(const Scenario& s, const TransitionOrder& order) {
  OnDevice state = start_of(order);
  if (state.weights || state.kv || s.rollout.sleep_level == 1) {
    // What never sleeps wakes here; of what sleeps at level 1 the host copy begins to exist.
    JobPhase start{PlanPhase::start_rollout};
    start.wakes.weights = state.weights, start.wakes.kv = state.kv;
    add(start);
  }
  const auto every = static_cast<std::int32_t>(s.sync.every);
  bool exchanged = false;
  const auto exchange = [&] {
    if (!exchanged) add({PlanPhase::exchange});
    exchanged = true;
  };
  for (const TransitionStep* at = order.begin(); at != order.end(); ++at) {
    if (state.rolled_out && !may_precede_exchange(*at)) exchange();
    const OnDevice before = state;
    state.take(*at);
    JobPhase p{phase_of(*at, std::count(order.begin(), at, *at) > 0)};
    p.sleeps = without(before, state), p.wakes = without(state, before);
    if (!has_reference_copy(s)) p.sleeps.reference = p.wakes.reference = false;
    if (is_transition(p.phase) && p.phase != PlanPhase::flush && !p.sleeps.any() && !p.wakes.any()) continue;
    p.from_host = *at == sync && (!before.params || s.train.offload == Offload::layerwise);
    if (of_the_sync(order, at)) p.every = every;
    add(p);
  }
  exchange();
}

const JobPhase* JobPhases::find(PlanPhase p) const {
  const JobPhase* const at = std::find_if(begin(), end(), [&](const JobPhase& x) { return x.phase == p; });
  return at == end() ? nullptr : at;
}

}  // namespace hotbunk
