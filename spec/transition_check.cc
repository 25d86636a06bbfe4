#include "spec/transition_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace hotbunk {
namespace {

using enum TransitionStep;

class Check {
 public:
  Check(const Scenario& s, const ScenarioLocator& locate) : s_(s), locate_(locate) {}

  Diagnostics run() {
    const bool layerwise = s_.train.offload == Offload::layerwise;
    if (layerwise && s_.transition != "hotbunk") {
      const auto order = transition_from(s_.transition, true, s_.rollout.sleep);
      if (order && training_sleeps(*order)) return beside_layerwise(), std::move(problems_);
    }
    const auto order = transition_from(s_.transition, s_.train.offload == Offload::sleep, s_.rollout.sleep);
    if (s_.transition != "auto" && !order) illegal(order.error());
    if (order) {
      passes(*order);
      if (s_.sync.every > 1) kept_weights(*order);
    }
    return std::move(problems_);
  }

 private:
  void report(const char* code, std::string_view key, std::string message, std::vector<std::string> notes,
              std::string help) {
    problems_.push_back({.code = code,
                         .message = std::move(message),
                         .where = locate_(key),
                         .notes = std::move(notes),
                         .help = std::move(help)});
  }

  void beside_layerwise() {
    report("E214", "transition", "layer-wise offload and whole-state sleep exclude each other",
           {fmt::format("transition {} puts training's state to sleep; layer-wise offload keeps the optimizer on the "
                        "host for ever",
                        s_.transition.substr(0, 200))},
           "set transition to hotbunk, which then moves nothing of training, or train.offload to sleep");
  }

  void illegal(const TransitionFault& fault) {
    std::string help = fault.help;
    if (help.empty()) {
      std::vector<std::string_view> steps;
      for (std::size_t i = 0; i < num_transition_steps; ++i) steps.push_back(name_of(static_cast<TransitionStep>(i)));
      help =
          fmt::format("one of {}, auto, or a list of {}", fmt::join(transition_names(), ", "), fmt::join(steps, ", "));
    }
    // A list knows where each of its steps stands.
    report("E225", fault.index < 0 ? "transition" : fmt::format("transition.{}", fault.index),
           fmt::format("'{}' is no legal order of a cycle", s_.transition.substr(0, 200)), {fault.note},
           std::move(help));
  }

  void passes(const TransitionOrder& order) {
    const auto lacks = [&](std::initializer_list<TransitionStep> steps, const char* key, bool has) {
      for (std::size_t i = 0; !has && i < order.size(); ++i) {
        const TransitionStep s = order.begin()[i];
        if (std::ranges::find(steps, s) == steps.end()) continue;
        return report("E225", fmt::format("transition.{}", i),
                      fmt::format("the transition has a step for what the algorithm does without"),
                      {fmt::format("step {}, {}: {} is false", i + 1, name_of(s), key)},
                      fmt::format("leave the step out, or set {} to true", key));
      }
    };
    lacks({sleep_reference, wake_reference, TransitionStep::reference}, "algorithm.reference", s_.algorithm.reference);
    lacks({old_logprobs}, "algorithm.old_logprobs", s_.algorithm.old_logprobs);
    if (s_.model.lora.on() && s_.algorithm.reference) adapters(order);
  }

  /// The reference of adapters is the model that is trained, without them.
  void adapters(const TransitionOrder& order) {
    OnDevice state = start_of(order);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const TransitionStep step = order.begin()[i];
      state.take(step);
      if (step == TransitionStep::reference && !state.params)
        report("E225", fmt::format("transition.{}", i),
               "the reference's log-probs come before the parameters that they are computed with are awake",
               {fmt::format("step {}, {}; with train.lora the reference is the frozen model itself", i + 1,
                            name_of(step))},
               "move wake_train in front of it");
    }
  }

  void kept_weights(const TransitionOrder& order) {
    if (!(order.has(sleep_rollout) || order.has(sleep_weights)) || s_.rollout.sleep_level == 1) return;
    report("E225", "sync.every", "iterations without a sync have no weights to roll out with",
           {fmt::format("sync.every {}, and rollout.sleep_level {} drops the weights whenever the rollout sleeps",
                        s_.sync.every, s_.rollout.sleep_level)},
           "set rollout.sleep_level to 1, which keeps them in host memory, or let the KV cache alone sleep");
  }

  const Scenario& s_;
  const ScenarioLocator& locate_;
  Diagnostics problems_;
};

}  // namespace

TransitionOrder transition_of(const Scenario& s) {
  const bool train = s.train.offload == Offload::sleep;
  if (const auto order = transition_from(s.transition, train, s.rollout.sleep)) return *order;
  return *transition_from("hotbunk", train, s.rollout.sleep);
}

Diagnostics check_transition(const Scenario& s, const ScenarioLocator& locate) { return Check(s, locate).run(); }

}  // namespace hotbunk
