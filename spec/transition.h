// The order of one iteration's changes of shift, as data: what sleeps, wakes and moves between training and rollout.
// A scenario writes it under `transition`; the planner prices every legal order (planner/rl/transition_cost.h).
#pragma once
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Steps of a cycle that starts right after training. Names are those of the plan's phases (docs/plan.md) where a phase
/// does the same.
enum class TransitionStep : std::uint8_t {
  sleep_optimizer,  // moments, master copies and reference to the host
  sleep_train,      // parameters to the host
  wake_params,      // parameters back, for the sync alone
  wake_rollout,     // the rollout's weights are mapped
  sync,             // from parameters on the device, else bucket by bucket from their host copy
  wake_kv,
  rollout,
  sleep_rollout,  // weights and KV cache of the rollout
  wake_train      // everything of training that sleeps
};
inline constexpr std::size_t num_transition_steps = 9;
std::string_view name_of(TransitionStep);

/// A short list without allocation.
class TransitionOrder {
 public:
  static constexpr std::size_t most = 11;  // every step once, parameters in and out of the sync once more
  TransitionOrder() = default;
  TransitionOrder(std::initializer_list<TransitionStep> steps) {
    for (TransitionStep s : steps) push(s);
  }
  void push(TransitionStep s) { steps_[count_++] = s; }
  void pop() { steps_[--count_] = {}; }
  const TransitionStep* begin() const { return steps_.data(); }
  const TransitionStep* end() const { return steps_.data() + count_; }
  std::size_t size() const { return count_; }
  bool has(TransitionStep s) const;
  auto operator<=>(const TransitionOrder&) const = default;

 private:
  std::array<TransitionStep, most> steps_{};
  std::uint8_t count_ = 0;
};

/// What lies on the device between two steps.
struct OnDevice {
  bool params = true, optimizer = true, weights = false, kv = false, synced = false, rolled_out = false;

  /// nullptr, or why the step cannot follow.
  const char* why_not(TransitionStep) const;
  void take(TransitionStep);
  /// A cycle ends as it began: training awake, the rollout as before.
  bool closes(const OnDevice& start) const;
};
/// Before the first step: training awake; a rollout that never sleeps awake too.
OnDevice start_of(const TransitionOrder&);

/// "" or why this is no cycle: a step without what it needs, no sync before the rollout, something left asleep or
/// awake.
std::string why_illegal(const TransitionOrder&);

/// Every legal cycle in which exactly these parts sleep; `reload`: also those that wake parameters for the sync.
std::vector<TransitionOrder> legal_transitions(bool params, bool optimizer, bool rollout, bool reload);

/// "sleep_optimizer-wake_rollout-sync-…", or one of the systems' names: hotbunk, slime, verl, verl-old.
std::string to_text(const TransitionOrder&);
/// A system's order without the steps of what does not sleep; else the steps spelled out. The error is a sentence.
tl::expected<TransitionOrder, std::string> transition_from(std::string_view text, bool train_sleeps,
                                                           bool rollout_sleeps);
const std::vector<std::string_view>& transition_names();

}  // namespace hotbunk
