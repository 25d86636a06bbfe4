// What makes an order of sleep, wake and sync legal: one rule, one sentence. Memory is none of them: what does not fit
// is the capacity check's to say (trace/static_memory.h).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "spec/transition.h"

namespace hotbunk {
namespace {

using enum TransitionStep;

struct Rule {
  TransitionStep step;
  bool (*holds)(const OnDevice&);
  BrokenRule broken;
};

constexpr Rule rules[] = {
    {sleep_optimizer,
     [](const OnDevice& d) { return d.optimizer(); },
     {"the optimizer sleeps already", "leave the second sleep out"}},
    {sleep_moments,
     [](const OnDevice& d) { return d.moments; },
     {"the moments sleep already", "leave the second sleep out"}},
    {sleep_reference,
     [](const OnDevice& d) { return d.reference; },
     {"the reference sleeps already", "leave the second sleep out"}},
    {sleep_train,
     [](const OnDevice& d) { return d.params; },
     {"the parameters sleep already", "leave the second sleep out, or wake_params between the two"}},
    {wake_params,
     [](const OnDevice& d) { return !d.params; },
     {"the parameters are awake", "leave it out, or put sleep_train before it"}},
    {wake_moments,
     [](const OnDevice& d) { return !d.moments; },
     {"the moments are awake", "leave it out, or put sleep_optimizer before it"}},
    {wake_reference,
     [](const OnDevice& d) { return !d.reference; },
     {"the reference is awake", "leave it out, or put sleep_optimizer before it"}},
    {wake_rollout,
     [](const OnDevice& d) { return !d.weights; },
     {"the rollout's weights are awake", "leave the second wake out"}},
    {wake_rollout, [](const OnDevice& d) { return !d.rolled_out; }, {"the rollout is over", "put it before sync"}},
    {sync,
     [](const OnDevice& d) { return d.weights; },
     {"a sync writes the rollout's weights, which sleep", "put wake_rollout before sync"}},
    {sync,
     [](const OnDevice& d) { return !d.synced; },
     {"the rollout has the new weights already", "leave the second sync out"}},
    {flush,
     [](const OnDevice& d) { return d.kv; },
     {"the KV cache sleeps, and asleep it holds nothing", "leave it out, or put it where the KV cache is awake"}},
    {wake_kv, [](const OnDevice& d) { return !d.kv; }, {"the KV cache is awake", "leave the second wake out"}},
    {wake_kv, [](const OnDevice& d) { return !d.rolled_out; }, {"the rollout is over", "put it before rollout"}},
    {rollout, [](const OnDevice& d) { return !d.rolled_out; }, {"the rollout has run", "leave the second rollout out"}},
    {rollout,
     [](const OnDevice& d) { return d.weights; },
     {"a rollout computes with its weights, which sleep", "put wake_rollout and sync before rollout"}},
    {rollout,
     [](const OnDevice& d) { return d.synced; },
     {"a rollout samples from the weights that a sync brought, and none came", "put sync before rollout"}},
    {rollout,
     [](const OnDevice& d) { return d.kv; },
     {"a rollout writes its KV cache, which sleeps", "put wake_kv before rollout"}},
    {sleep_rollout,
     [](const OnDevice& d) { return d.rolled_out; },
     {"the rollout has not run", "put it behind rollout"}},
    {sleep_rollout,
     [](const OnDevice& d) { return d.weights || d.kv; },
     {"the rollout sleeps already", "leave the second sleep out"}},
    {sleep_kv, [](const OnDevice& d) { return d.rolled_out; }, {"the rollout has not run", "put it behind rollout"}},
    {sleep_kv, [](const OnDevice& d) { return d.kv; }, {"the KV cache sleeps already", "leave the second sleep out"}},
    {sleep_weights,
     [](const OnDevice& d) { return d.rolled_out; },
     {"the rollout has not run", "put it behind rollout"}},
    {sleep_weights,
     [](const OnDevice& d) { return d.weights; },
     {"the rollout's weights sleep already", "leave the second sleep out"}},
    {wake_train,
     [](const OnDevice& d) { return d.rolled_out; },
     {"the rollout has not run", "put it behind rollout; wake_params alone may come before"}},
    {wake_train,
     [](const OnDevice& d) { return !d.params || !d.moments || !d.reference; },
     {"nothing of training sleeps", "leave it out"}},
    {reference,
     [](const OnDevice& d) { return d.rolled_out; },
     {"there are no samples before the rollout", "put it behind rollout"}},
    {reference,
     [](const OnDevice& d) { return d.reference; },
     {"its log-probs need the reference, which sleeps", "put wake_reference or wake_train before it"}},
    {reference,
     [](const OnDevice& d) { return !d.reference_passed; },
     {"the reference's log-probs are known", "leave the second one out"}},
    {old_logprobs,
     [](const OnDevice& d) { return d.rolled_out; },
     {"there are no samples before the rollout", "put it behind rollout"}},
    {old_logprobs,
     [](const OnDevice& d) { return d.params; },
     {"its log-probs need the parameters, which sleep", "put wake_params or wake_train before it"}},
    {old_logprobs,
     [](const OnDevice& d) { return !d.old_passed; },
     {"the old log-probs are known", "leave the second one out"}},
};

constexpr BrokenRule listed_before = {"it is listed before; only sleep_train and wake_params may come twice",
                                      "leave one of them out"};

/// "parameters, weights; asleep: moments, …".
std::string describe(const OnDevice& d) {
  std::vector<std::string_view> awake, asleep;
  const auto add = [&](bool is_awake, std::string_view what) { (is_awake ? awake : asleep).push_back(what); };
  add(d.params, "parameters"), add(d.moments, "moments"), add(d.reference, "reference");
  add(d.weights, "rollout weights"), add(d.kv, "KV cache");
  const auto list = [](const std::vector<std::string_view>& of) {
    return of.empty() ? std::string("nothing") : fmt::format("{}", fmt::join(of, ", "));
  };
  return fmt::format("awake then: {}; asleep: {}", list(awake), list(asleep));
}

TransitionFault fault_at(std::size_t index, TransitionStep s, const BrokenRule& rule, const OnDevice& then) {
  return {fmt::format("step {}, {}: {}; {}", index + 1, name_of(s), rule.why, describe(then)), rule.remedy,
          static_cast<std::int32_t>(index)};
}

}  // namespace

const BrokenRule* OnDevice::why_not(TransitionStep s) const {
  for (const Rule& rule : rules)
    if (rule.step == s && !rule.holds(*this)) return &rule.broken;
  return nullptr;
}

void OnDevice::take(TransitionStep s) {
  switch (s) {
    case sleep_optimizer:
      moments = reference = false;
      break;
    case sleep_moments:
      moments = false;
      break;
    case sleep_reference:
      reference = false;
      break;
    case sleep_train:
      params = false;
      break;
    case wake_params:
      params = true;
      break;
    case wake_moments:
      moments = true;
      break;
    case wake_reference:
      reference = true;
      break;
    case wake_rollout:
      weights = true;
      break;
    case sync:
      synced = true;
      break;
    case flush:
      break;
    case wake_kv:
      kv = true;
      break;
    case rollout:
      rolled_out = true;
      break;
    case sleep_rollout:
      weights = kv = false;
      break;
    case sleep_kv:
      kv = false;
      break;
    case sleep_weights:
      weights = false;
      break;
    case wake_train:
      params = moments = reference = true;
      break;
    case TransitionStep::reference:
      reference_passed = true;
      break;
    case old_logprobs:
      old_passed = true;
      break;
  }
}

bool OnDevice::closes(const OnDevice& start) const {
  return rolled_out && params && moments && reference && weights == start.weights && kv == start.kv;
}

OnDevice start_of(const TransitionOrder& order) {
  return {.weights = !order.has(wake_rollout), .kv = !order.has(wake_kv)};
}

std::optional<TransitionFault> why_illegal(const TransitionOrder& order) {
  OnDevice state = start_of(order);
  const OnDevice start = state;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const TransitionStep s = order.begin()[i];
    if (const BrokenRule* rule = state.why_not(s)) return fault_at(i, s, *rule, state);
    const auto before = std::count(order.begin(), order.begin() + i, s);
    if (before > (s == sleep_train || s == wake_params ? 1 : 0)) return fault_at(i, s, listed_before, state);
    state.take(s);
  }
  const auto at_end = [&](const char* why, const char* remedy) {
    return TransitionFault{fmt::format("at the end: {}; {}", why, describe(state)), remedy, -1};
  };
  if (!state.rolled_out) return at_end("there is no rollout", "list sync and rollout");
  if (!state.params || !state.moments || !state.reference)
    return at_end("training begins, and part of it sleeps", "add wake_train");
  if (state.weights != start.weights)
    return at_end(state.weights ? "the rollout's weights are awake but wake in the cycle"
                                : "the rollout's weights sleep but nothing wakes them",
                  state.weights ? "add sleep_rollout behind rollout" : "put wake_rollout before sync");
  if (state.kv != start.kv)
    return at_end(
        state.kv ? "the KV cache is awake but wakes in the cycle" : "the KV cache sleeps but nothing wakes it",
        state.kv ? "add sleep_rollout behind rollout" : "put wake_kv before rollout");
  return std::nullopt;
}

}  // namespace hotbunk
