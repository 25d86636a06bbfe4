#include "spec/transition.h"

#include <catch2/catch.hpp>
#include <set>

#include "spec/scenario.h"

namespace hotbunk {
namespace {
using enum TransitionStep;
}

TEST_CASE("systems' transition orders are legal and keep their names") {
  for (const std::string_view name : transition_names()) {
    INFO(name);
    const auto order = transition_from(name, true, true);
    REQUIRE(order.has_value());
    CHECK(why_illegal(*order).empty());
    CHECK(to_text(*order) == name);
  }
  // Without sleep a name keeps what is left: the sync in the middle of nothing.
  const auto awake = transition_from("slime", false, false);
  REQUIRE(awake.has_value());
  CHECK(*awake == TransitionOrder{sync, rollout});
  CHECK(why_illegal(*awake).empty());
}

TEST_CASE("orders that cannot be are refused with the step that fails") {
  const struct {
    const char *text, *why;
  } cases[] = {
      {"", "no step"},
      {"sync", "there is no rollout"},
      {"wake_rollout-wake_kv-rollout-sync", "needs synced weights"},
      {"sleep_optimizer-sleep_optimizer", "sleeps already"},
      {"sleep_optimizer-wake_rollout-sync-wake_kv-rollout-sleep_rollout", "asleep at the end"},
      {"sleep_optimizer-wake_rollout-sync-wake_kv-rollout-wake_train", "add sleep_rollout"},
      {"wake_rollout-sync-wake_kv-rollout-sleep_rollout", "train.offload is sleep"},
      {"sleep_train-nap", "'nap' is no step"},
      {"sleep_optimizer-wake_train", "after the rollout"},
      {"sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync", "too many"},
  };
  for (const auto& c : cases) {
    INFO(c.text);
    const auto order = transition_from(c.text, true, true);
    REQUIRE_FALSE(order.has_value());
    CHECK_THAT(order.error(), Catch::Contains(c.why));
  }
}

TEST_CASE("legal orders: counted by hand where both sleep, each once, each legal") {
  // Optimizer only, rollout asleep: to_rollout permutes {sleep_optimizer, wake_rollout, sync, wake_kv} with
  // wake_rollout before sync and before wake_kv: 4! / 3 = 8 orders. sleep_optimizer may also come after the rollout,
  // where the same memory is free again only if it wakes: rollout, then sleep_optimizer, wake_train, sleep_rollout with
  // wake_train after sleep_optimizer (3 orders), over 2 orders of the rest before the rollout: 6 more. Before it,
  // {sleep_rollout, wake_train} give 2 orders each: 16. Together 22.
  const auto optimizer = legal_transitions(false, true, true, false);
  CHECK(optimizer.size() == 22);
  for (const bool params : {false, true})
    for (const bool moments : {false, true})
      for (const bool rollout : {false, true}) {
        const auto all = legal_transitions(params, moments, rollout, true);
        CHECK_FALSE(all.empty());
        CHECK(std::set<TransitionOrder>(all.begin(), all.end()).size() == all.size());
        for (const TransitionOrder& o : all) {
          CHECK(why_illegal(o).empty());
          CHECK(transition_from(to_text(o), params || moments, rollout) == o);
        }
      }
  const auto both = legal_transitions(true, true, true, true);
  for (const std::string_view name : transition_names())
    CHECK(std::count(both.begin(), both.end(), *transition_from(name, true, true)) == 1);
}

}  // namespace hotbunk
