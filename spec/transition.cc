#include "spec/transition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

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

bool of_rollout(TransitionStep s) { return s == wake_rollout || s == wake_kv || s == sleep_rollout; }

/// Depth first over the states; each step at most once, a second sleep_train only after wake_params.
void extend(TransitionOrder& order, const OnDevice& start, const OnDevice& state,
            const std::vector<TransitionStep>& steps, std::vector<TransitionOrder>& out) {
  if (state.closes(start)) out.push_back(order);
  if (order.size() == TransitionOrder::most) return;
  for (TransitionStep s : steps) {
    const auto times = std::count(order.begin(), order.end(), s);
    if (times > (s == sleep_train && order.has(wake_params) ? 1 : 0)) continue;
    if (state.why_not(s) || (s == wake_params && state.synced) || (s == wake_kv && !state.weights)) continue;
    OnDevice next = state;
    next.take(s);
    order.push(s);
    extend(order, start, next, steps, out);
    order.pop();
  }
}

}  // namespace

std::string_view name_of(TransitionStep s) {
  constexpr std::array<std::string_view, num_transition_steps> names = {
      "sleep_optimizer", "sleep_train",  "wake_params",    "wake_rollout", "sync",
      "wake_kv",         "rollout",      "sleep_rollout",  "wake_train",   "sleep_moments",
      "sleep_reference", "wake_moments", "wake_reference", "sleep_kv",     "sleep_weights",
      "flush",           "reference",    "old_logprobs"};
  return names[static_cast<std::size_t>(s)];
}

bool TransitionOrder::has(TransitionStep s) const { return std::find(begin(), end(), s) != end(); }

bool is_sleep(TransitionStep s) { return name_of(s).starts_with("sleep_"); }

bool training_sleeps(const TransitionOrder& order) {
  return std::ranges::any_of(order, [](TransitionStep s) {
    return s == sleep_optimizer || s == sleep_train || s == sleep_moments || s == sleep_reference;
  });
}
bool rollout_sleeps(const TransitionOrder& order) {
  return std::ranges::any_of(
      order, [](TransitionStep s) { return s == sleep_rollout || s == sleep_kv || s == sleep_weights; });
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
  // Shorter cycles leave a part awake: they belong to another call. So do those in which parameters sleep and wake
  // again before the rollout, and are awake in it: copied out and back for nothing.
  std::erase_if(out, [&](const TransitionOrder& o) {
    if (o.has(wake_params) && std::ranges::count(o, sleep_train) < 2) return true;
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

namespace {

/// The steps of "a-b-c", legal or not.
tl::expected<TransitionOrder, TransitionFault> spelled_out(std::string_view text) {
  TransitionOrder out;
  while (true) {
    const std::string_view word = text.substr(0, text.find('-'));
    std::size_t i = 0;
    while (i < num_transition_steps && name_of(static_cast<TransitionStep>(i)) != word) ++i;
    const auto index = static_cast<std::int32_t>(out.size());
    if (i == num_transition_steps)
      return tl::unexpected(
          TransitionFault{fmt::format("step {}: '{}' is no step", index + 1, word.substr(0, 40)), "", index});
    if (out.size() == TransitionOrder::most)
      return tl::unexpected(TransitionFault{fmt::format("more than {} steps", TransitionOrder::most), "", index});
    out.push(static_cast<TransitionStep>(i));
    if (word.size() == text.size()) return out;
    text.remove_prefix(word.size() + 1);
  }
}

}  // namespace

tl::expected<TransitionOrder, TransitionFault> transition_from(std::string_view text, bool train_sleeps,
                                                               bool rollout_sleeps) {
  if (std::ranges::find(transition_names(), text) != transition_names().end())
    return order_where(text, train_sleeps, train_sleeps, rollout_sleeps);
  auto out = spelled_out(text);
  if (!out) return out;
  if (auto fault = why_illegal(*out)) return tl::unexpected(std::move(*fault));
  if (training_sleeps(*out) != train_sleeps)
    return tl::unexpected(TransitionFault{
        fmt::format("training {} in it, but train.offload is {}", train_sleeps ? "never sleeps" : "sleeps",
                    train_sleeps ? "sleep" : "not sleep"),
        train_sleeps ? "set train.offload to none, or list what sleeps" : "set train.offload to sleep", -1});
  if (hotbunk::rollout_sleeps(*out) != rollout_sleeps)
    return tl::unexpected(TransitionFault{fmt::format("the rollout {} in it, but rollout.sleep is {}",
                                                      rollout_sleeps ? "never sleeps" : "sleeps", rollout_sleeps),
                                          fmt::format("set rollout.sleep to {}", !rollout_sleeps), -1});
  return out;
}

TransitionOrder order_where(std::string_view name, bool params, bool optimizer, bool rollout) {
  TransitionOrder out;
  for (const Named& n : named_orders())
    for (TransitionStep s : n.name == name ? n.order : TransitionOrder())
      if (s == sleep_optimizer                   ? optimizer
          : s == sleep_train || s == wake_params ? params
          : s == wake_train                      ? params || optimizer
                                                 : rollout || !of_rollout(s))
        out.push(s);
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
