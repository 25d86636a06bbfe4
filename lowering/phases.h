// The phases of a job, in order: the one list that lower() writes plans from.
// What stands between training and rollout is the scenario's transition (spec/transition.h).
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "graph/plan.h"
#include "spec/transition_check.h"

namespace hotbunk {

/// Every phase that a job may have. Names are a contract (docs/plan.md).
enum class PlanPhase : std::uint8_t {
  load,
  start_rollout,
  sleep_optimizer,
  sleep_moments,
  sleep_reference,
  wake_rollout,
  wake_params,
  wake_params_again,  // a step that is listed twice
  sync,
  sleep_train,
  sleep_train_again,
  flush,
  wake_kv,
  rollout,
  sleep_rollout,
  sleep_kv,
  sleep_weights,
  exchange,
  samples,  // roles apart: the trainer waits for what the engines sampled
  wake_train,
  wake_moments,
  wake_reference,
  wake_work,  // nothing of training slept: it takes what it works in
  framework,  // what it takes beside its passes: data, verification, collation, logging
  reference,
  old_logprobs,
  values,  // PPO: the critic's forward passes, and its optimizer steps
  critic,
  train,
  checkpoint,
  export_,
  count
};
inline constexpr std::size_t num_plan_phases = static_cast<std::size_t>(PlanPhase::count);
std::string_view name_of(PlanPhase);
/// PlanPhase::count: none is called so.
PlanPhase phase_named(std::string_view);

/// A number of bytes for each phase; 0 where a plan lacks it.
using PhaseBytes = std::array<std::int64_t, num_plan_phases>;

constexpr bool is_prologue(PlanPhase p) { return p == PlanPhase::load || p == PlanPhase::start_rollout; }
constexpr bool is_driven(PlanPhase p) {
  return p == PlanPhase::rollout || p == PlanPhase::exchange || p == PlanPhase::framework || p >= PlanPhase::reference;
}
constexpr bool is_sleep(PlanPhase p) {
  return p == PlanPhase::sleep_optimizer || p == PlanPhase::sleep_moments || p == PlanPhase::sleep_reference ||
         p == PlanPhase::sleep_train || p == PlanPhase::sleep_train_again || p == PlanPhase::sleep_rollout ||
         p == PlanPhase::sleep_kv || p == PlanPhase::sleep_weights;
}
/// It puts to sleep, wakes or forgets.
constexpr bool is_transition(PlanPhase p) {
  return p != PlanPhase::load && p != PlanPhase::sync && p != PlanPhase::samples && p != PlanPhase::wake_work &&
         !is_driven(p);
}
/// Log-probs, training and what it leaves: its transients depend on how training computes.
constexpr bool is_training(PlanPhase p) { return p >= PlanPhase::reference; }
constexpr When when_of(PlanPhase p) {
  return is_prologue(p) ? When::prologue : p == PlanPhase::export_ ? When::epilogue : When::iteration;
}
/// The parts that sleep and wake, as what is awake of each or what a phase moves of them.
struct SleepParts {
  bool params = false, moments = false, reference = false, weights = false, kv = false;
  bool any() const { return params || moments || reference || weights || kv; }
};

/// One phase of a job.
struct JobPhase {
  PlanPhase phase{};
  SleepParts sleeps{}, wakes{};  // in it
  bool from_host = false;        // a sync: training's parameters sleep
  std::int32_t every = 1;        // PhaseInfo::every
  PhaseInfo info() const;
};

/// Whether the policy that training began with is kept beside the one that is trained. A frozen model with adapters is
/// it itself.
inline bool has_reference_copy(const Scenario& s) { return s.algorithm.reference && !s.model.lora.on(); }

/// A short list without allocation; each phase at most once. A step that finds nothing to move (the optimizer's, when
/// its moments sleep and there is no reference) is no phase.
class JobPhases {
 public:
  JobPhases() = default;  // none
  /// Of a job of this scenario, which is valid.
  explicit JobPhases(const Scenario&);
  const JobPhase* begin() const { return phases_.data(); }
  const JobPhase* end() const { return phases_.data() + count_; }
  /// nullptr: the job does without.
  const JobPhase* find(PlanPhase) const;
  bool has(PlanPhase p) const { return find(p) != nullptr; }
  /// What is put to sleep in the course of an iteration.
  const SleepParts& sleepers() const { return sleepers_; }

 private:
  void add(const JobPhase& p) { phases_[count_++] = p; }
  void add_transition(const Scenario&, const TransitionOrder&);

  std::array<JobPhase, num_plan_phases> phases_{};
  std::size_t count_ = 0;
  SleepParts sleepers_;
};

}  // namespace hotbunk
