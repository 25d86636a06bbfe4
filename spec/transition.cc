#include "spec/transition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace hotbunk {
namespace {

using enum TransitionStep;

struct Named {
  std::string_view name;
  TransitionOrder order;
};

/// BACKGROUND E2, E2b, E2c. verl offloads after training, loads the shards again for the sync and offloads them; its
/// older worker loaded and offloaded before the engine resumed, so that the sync read host copies, as slime's does.
const std::vector<Named>& named_orders() {
  static const std::vector<Named> orders = {
      {"hotbunk", {sleep_optimizer, wake_rollout, sync, sleep_train, wake_kv, rollout, sleep_rollout, wake_train}},
      {"slime", {sleep_optimizer, sleep_train, wake_rollout, sync, wake_kv, rollout, sleep_rollout, wake_train}},
      {"verl",
       {sleep_optimizer, sleep_train, wake_rollout, wake_params, sync, sleep_train, wake_kv, rollout, sleep_rollout,
        wake_train}},
      {"verl-old",
       {sleep_optimizer, sleep_train, wake_params, sleep_train, wake_rollout, sync, wake_kv, rollout, sleep_rollout,
        wake_train}},
  };
  return orders;
}

bool of_training(TransitionStep s) {
  return s == sleep_optimizer || s == sleep_train || s == wake_params || s == wake_train;
}
bool of_rollout(TransitionStep s) { return s == wake_rollout || s == wake_kv || s == sleep_rollout; }

/// Depth first over the states; each step at most once, a second sleep_train only after wake_params.
void extend(TransitionOrder& order, const OnDevice& start, const OnDevice& state,
            const std::vector<TransitionStep>& steps, std::vector<TransitionOrder>& out) {
  if (state.closes(start)) out.push_back(order);
  if (order.size() == TransitionOrder::most) return;
  for (TransitionStep s : steps) {
    const auto times = std::count(order.begin(), order.end(), s);
    if (times > (s == sleep_train && order.has(wake_params) ? 1 : 0)) continue;
    if (state.why_not(s)) continue;
    OnDevice next = state;
    next.take(s);
    order.push(s);
    extend(order, start, next, steps, out);
    order.pop();
  }
}

}  // namespace

std::string_view name_of(TransitionStep s) {
  constexpr std::string_view names[] = {"sleep_optimizer", "sleep_train", "wake_params",   "wake_rollout", "sync",
                                        "wake_kv",         "rollout",     "sleep_rollout", "wake_train"};
  return names[static_cast<std::size_t>(s)];
}

bool TransitionOrder::has(TransitionStep s) const { return std::find(begin(), end(), s) != end(); }

const char* OnDevice::why_not(TransitionStep s) const {
  const auto need = [](bool ok, const char* why) { return ok ? nullptr : why; };
  switch (s) {
    case sleep_optimizer:
      return need(optimizer, "the optimizer sleeps already");
    case sleep_train:
      return need(params, "the parameters sleep already");
    case wake_params:
      return need(!params && !synced, "the parameters are awake, or the sync is over");
    case wake_rollout:
      return need(!weights && !rolled_out, "the rollout's weights are awake, or the rollout is over");
    case sync:
      return need(weights && !synced, "it needs the rollout's weights awake, once");
    case wake_kv:
      return need(!kv && weights && !rolled_out, "the KV cache is awake, its weights asleep, or the rollout is over");
    case rollout:
      return need(synced && weights && kv && !rolled_out, "it needs synced weights and the KV cache, once");
    case sleep_rollout:
      return need(rolled_out && weights, "the rollout has not run, or sleeps already");
    case wake_train:
      return need(rolled_out && (!params || !optimizer), "nothing of training sleeps after the rollout");
  }
  return "no such step";
}

void OnDevice::take(TransitionStep s) {
  switch (s) {
    case sleep_optimizer:
      optimizer = false;
      break;
    case sleep_train:
      params = false;
      break;
    case wake_params:
      params = true;
      break;
    case wake_rollout:
      weights = true;
      break;
    case sync:
      synced = true;
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
    case wake_train:
      params = optimizer = true;
      break;
  }
}

bool OnDevice::closes(const OnDevice& start) const {
  return rolled_out && params && optimizer && weights == start.weights && kv == start.kv;
}

OnDevice start_of(const TransitionOrder& order) {
  const bool awake = !order.has(wake_rollout);
  return {.weights = awake, .kv = awake};
}

std::string why_illegal(const TransitionOrder& order) {
  OnDevice state = start_of(order);
  const OnDevice start = state;
  for (TransitionStep s : order)
    if (const char* why = state.why_not(s)) return fmt::format("{}: {}", name_of(s), why);
    else state.take(s);
  if (!state.rolled_out) return "there is no rollout";
  if (!state.params || !state.optimizer) return "training is asleep at the end of the cycle, add wake_train";
  if (state.weights != start.weights || state.kv != start.kv)
    return "the rollout is awake at the end of the cycle but wakes in it, add sleep_rollout";
  return "";
}

std::vector<TransitionOrder> legal_transitions(bool params, bool optimizer, bool sleeps, bool reload) {
  std::vector<TransitionStep> steps = {sync, rollout};
  if (optimizer) steps.push_back(sleep_optimizer);
  if (params) steps.push_back(sleep_train);
  if (params && reload) steps.push_back(wake_params);
  if (params || optimizer) steps.push_back(wake_train);
  if (sleeps) steps.insert(steps.end(), {wake_rollout, wake_kv, sleep_rollout});
  std::vector<TransitionOrder> out;
  TransitionOrder order;
  const OnDevice start{.weights = !sleeps, .kv = !sleeps};
  extend(order, start, start, steps, out);
  // Shorter cycles leave a part awake: they belong to another call.
  std::erase_if(out, [&](const TransitionOrder& o) {
    return o.has(sleep_optimizer) != optimizer || o.has(sleep_train) != params || o.has(wake_rollout) != sleeps;
  });
  return out;
}

std::string to_text(const TransitionOrder& order) {
  for (const Named& n : named_orders())
    if (n.order == order) return std::string(n.name);
  std::vector<std::string_view> names;
  for (TransitionStep s : order) names.push_back(name_of(s));
  return fmt::format("{}", fmt::join(names, "-"));
}

tl::expected<TransitionOrder, std::string> transition_from(std::string_view text, bool train_sleeps,
                                                           bool rollout_sleeps) {
  for (const Named& n : named_orders()) {
    if (n.name != text) continue;
    TransitionOrder out;
    for (TransitionStep s : n.order)
      if ((train_sleeps || !of_training(s)) && (rollout_sleeps || !of_rollout(s))) out.push(s);
    return out;
  }
  TransitionOrder out;
  std::string_view rest = text;
  while (true) {
    const std::string_view word = rest.substr(0, rest.find('-'));
    std::size_t i = 0;
    while (i < num_transition_steps && name_of(static_cast<TransitionStep>(i)) != word) ++i;
    if (i == num_transition_steps) return tl::unexpected(fmt::format("'{}' is no step", word.substr(0, 40)));
    if (out.size() == TransitionOrder::most) return tl::unexpected(std::string("too many steps"));
    out.push(static_cast<TransitionStep>(i));
    if (word.size() == rest.size()) break;
    rest.remove_prefix(word.size() + 1);
  }
  if (std::string why = why_illegal(out); !why.empty()) return tl::unexpected(std::move(why));
  if ((out.has(sleep_train) || out.has(sleep_optimizer)) != train_sleeps)
    return tl::unexpected(fmt::format("training {}, but train.offload is {}", train_sleeps ? "never sleeps" : "sleeps",
                                      train_sleeps ? "sleep" : "not sleep"));
  if (out.has(sleep_rollout) != rollout_sleeps)
    return tl::unexpected(fmt::format("the rollout {}, but rollout.sleep is {}",
                                      rollout_sleeps ? "never sleeps" : "sleeps", rollout_sleeps));
  return out;
}

const std::vector<std::string_view>& transition_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> out;
    for (const Named& n : named_orders()) out.push_back(n.name);
    return out;
  }();
  return names;
}

}  // namespace hotbunk
