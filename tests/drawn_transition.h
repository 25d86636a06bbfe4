// A random legal order of sleep, wake and sync, out of all steps that there are: a walk over the rules.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "spec/transition.h"

namespace hotbunk::testing {

struct DrawnTransition {
  TransitionOrder order;
  bool training_sleeps = false, rollout_sleeps = false;

  /// As a scenario writes it, and the keys that go with it.
  std::vector<std::string> sets() const {
    return {"transition=" + to_text(order), std::string("train.offload=") + (training_sleeps ? "sleep" : "none"),
            std::string("rollout.sleep=") + (rollout_sleeps ? "true" : "false")};
  }
};

/// `below(n)` draws from [0, n). Log-prob passes are listed only where the job has them.
inline DrawnTransition draw_transition(const std::function<std::size_t(std::size_t)>& below, bool has_reference,
                                       bool has_old) {
  using enum TransitionStep;
  while (true) {
    const bool weights = below(4) > 0, kv = below(4) > 0;
    std::vector<TransitionStep> steps;
    for (std::size_t i = 0; i < num_transition_steps; ++i) {
      const auto s = static_cast<TransitionStep>(i);
      const bool of_reference = s == sleep_reference || s == wake_reference || s == reference;
      const bool possible = s == wake_rollout || s == sleep_weights ? weights
                            : s == wake_kv || s == sleep_kv         ? kv
                            : s == sleep_rollout                    ? weights && kv
                            : of_reference                          ? has_reference
                            : s == old_logprobs                     ? has_old
                                                                    : true;
      if (possible) steps.push_back(s);
    }
    OnDevice state{.weights = !weights, .kv = !kv};
    const OnDevice start = state;
    TransitionOrder order;
    while (order.size() < TransitionOrder::most && !(state.closes(start) && below(3) == 0)) {
      std::vector<TransitionStep> legal;
      for (TransitionStep s : steps) {
        const auto times = std::count(order.begin(), order.end(), s);
        if (times <= (s == sleep_train || s == wake_params ? 1 : 0) && !state.why_not(s)) legal.push_back(s);
      }
      if (legal.empty()) break;
      order.push(legal[below(legal.size())]);
      state.take(order.end()[-1]);
    }
    if (!why_illegal(order)) return {order, hotbunk::training_sleeps(order), hotbunk::rollout_sleeps(order)};
  }
}

}  // namespace hotbunk::testing
