// The order of one iteration's changes of shift, as data: what sleeps, wakes and moves between training and rollout.
// A scenario writes it under `transition`; the plan's phases follow it (lowering/phases.h), and the planner prices
// every legal order (planner/rl/transition_cost.h). What is legal is a table of rules in transition_rules.cc.
#pragma once
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Steps of a cycle that starts right after training. Names are those of the plan's phases (docs/plan.md).
enum class TransitionStep : std::uint8_t {
  sleep_optimizer,  // moments, master copies and reference to the host
  sleep_train,      // parameters to the host
  wake_params,
  wake_rollout,  // the rollout's weights are mapped
  sync,          // from parameters on the device, else bucket by bucket from their host copy
  wake_kv,
  rollout,
  sleep_rollout,  // weights and KV cache of the rollout
  wake_train,     // everything of training that sleeps
  // Parts of the above, for those who move them apart.
  sleep_moments,
  sleep_reference,
  wake_moments,
  wake_reference,
  sleep_kv,
  sleep_weights,
  flush,      // the KV cache stays, what it holds is forgotten
  reference,  // the log-prob passes, where they do not stand behind everything else
  old_logprobs
};
inline constexpr std::size_t num_transition_steps = 18;
std::string_view name_of(TransitionStep);
bool is_sleep(TransitionStep);

/// A short list without allocation.
class TransitionOrder {
 public:
  static constexpr std::size_t most = num_transition_steps + 2;  // sleep_train and wake_params may come twice
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

/// Why a step cannot stand where it does, and what to do about it; both end without a full stop.
struct BrokenRule {
  const char* why;
  const char* remedy;
};

/// What lies on the device between two steps, and what has been done.
struct OnDevice {
  bool params = true, moments = true, reference = true, weights = false, kv = false;
  bool synced = false, rolled_out = false, reference_passed = false, old_passed = false;

  /// Moments, masters and reference, which most orders move together.
  bool optimizer() const { return moments || reference; }
  /// nullptr, or the first rule that the step breaks.
  const BrokenRule* why_not(TransitionStep) const;
  void take(TransitionStep);
  /// A cycle ends as it began: training awake, the rollout as before.
  bool closes(const OnDevice& start) const;
};
/// Before the first step: training awake; of the rollout what never wakes.
OnDevice start_of(const TransitionOrder&);

/// Any part of it: then train.offload is sleep, rollout.sleep true.
bool training_sleeps(const TransitionOrder&);
bool rollout_sleeps(const TransitionOrder&);

/// What is wrong with an order.
struct TransitionFault {
  std::string note;         // "step 3, sync: …; on the device then: …"
  std::string help;         // "" or a remedy of its own
  std::int32_t index = -1;  // of the step, where one is at fault
};
/// A step without what it needs, no sync before the rollout, something left asleep or awake.
std::optional<TransitionFault> why_illegal(const TransitionOrder&);

/// Every legal cycle in which exactly these parts sleep, each as a whole; `reload`: also those that wake parameters for
/// the sync. A KV cache that wakes before its weights, or work between the wakes, adds only to the fullest moment: such
/// orders are legal and not listed.
std::vector<TransitionOrder> legal_transitions(bool params, bool optimizer, bool rollout, bool reload);

/// "sleep_optimizer-wake_rollout-sync-…", or one of the systems' names: hotbunk, slime, verl, verl-old.
std::string to_text(const TransitionOrder&);
/// A system's order without the steps of what does not sleep; else the steps spelled out.
tl::expected<TransitionOrder, TransitionFault> transition_from(std::string_view text, bool train_sleeps,
                                                               bool rollout_sleeps);
const std::vector<std::string_view>& transition_names();
/// The order of that name where only these parts sleep. Of a name of transition_names().
TransitionOrder order_where(std::string_view name, bool params, bool optimizer, bool rollout);

}  // namespace hotbunk
