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
    CHECK_FALSE(why_illegal(*order));
    CHECK(to_text(*order) == name);
  }
  // Without sleep a name keeps what is left: the sync in the middle of nothing.
  const auto awake = transition_from("slime", false, false);
  REQUIRE(awake.has_value());
  CHECK(*awake == TransitionOrder{sync, rollout});
  CHECK_FALSE(why_illegal(*awake));
}

TEST_CASE("orders that cannot be are refused with the step that fails") {
  const struct {
    const char *text, *why, *then, *remedy;
  } cases[] = {
      {"", "step 1: '' is no step", "", ""},
      {"sync", "at the end: there is no rollout", "", "list sync and rollout"},
      {"wake_rollout-wake_kv-rollout-sync", "step 3, rollout", "awake then: parameters, moments, reference, rollout",
       "put sync before rollout"},
      {"sleep_optimizer-sync-wake_rollout", "step 2, sync: a sync writes the rollout's weights, which sleep",
       "awake then: parameters, KV cache; asleep: moments, reference, rollout weights", "put wake_rollout before sync"},
      {"wake_rollout-sync-sync", "step 3, sync: the rollout has the new weights already", "", "leave the second"},
      {"wake_rollout-sync-rollout-wake_kv", "step 3, rollout: a rollout writes its KV cache, which sleeps",
       "asleep: KV cache", "put wake_kv before rollout"},
      {"sync-flush-wake_kv-rollout", "step 2, flush: the KV cache sleeps", "", "where the KV cache is awake"},
      {"sync-rollout-rollout", "step 3, rollout: the rollout has run", "", ""},
      {"sync-old_logprobs-rollout", "step 2, old_logprobs: there are no samples", "", "put it behind rollout"},
      {"sleep_train-sync-rollout-old_logprobs", "step 4, old_logprobs: its log-probs need the parameters",
       "asleep: parameters", "put wake_params or wake_train before it"},
      {"sleep_reference-sync-rollout-reference", "step 4, reference: its log-probs need the reference",
       "asleep: reference", "put wake_reference or wake_train before it"},
      {"sleep_optimizer-sync-rollout-wake_moments", "at the end: training begins, and part of it sleeps",
       "asleep: reference", "add wake_train"},
      {"sleep_optimizer-sleep_optimizer", "step 2, sleep_optimizer: the optimizer sleeps already", "", ""},
      {"sleep_moments-wake_moments-sleep_moments-sync-rollout-wake_train", "step 3, sleep_moments: it is listed before",
       "", "leave one"},
      {"sleep_optimizer-wake_rollout-sync-wake_kv-rollout-sleep_rollout", "part of it sleeps", "", "add wake_train"},
      {"sleep_optimizer-wake_rollout-sync-wake_kv-rollout-wake_train", "the rollout's weights are awake", "",
       "add sleep_rollout"},
      {"sync-rollout-sleep_weights", "at the end: the rollout's weights sleep", "", "put wake_rollout before sync"},
      {"sleep_rollout-sync-rollout", "step 1, sleep_rollout: the rollout has not run", "", ""},
      {"wake_rollout-sync-wake_kv-rollout-sleep_rollout", "train.offload is sleep", "", "set train.offload to none"},
      {"sleep_train-sync-rollout-wake_train", "rollout.sleep is true", "", "set rollout.sleep to false"},
      {"sleep_train-nap", "step 2: 'nap' is no step", "", ""},
      {"sleep_optimizer-wake_train", "step 2, wake_train: the rollout has not run", "", "put it behind rollout"},
      {"sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync-sync",
       "more than 20 steps", "", ""},
  };
  for (const auto& c : cases) {
    INFO(c.text);
    const auto order = transition_from(c.text, true, true);
    REQUIRE_FALSE(order.has_value());
    CHECK_THAT(order.error().note, Catch::Contains(c.why) && Catch::Contains(c.then));
    CHECK_THAT(order.error().help, Catch::Contains(c.remedy));
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
          CHECK_FALSE(why_illegal(o));
          CHECK(transition_from(to_text(o), params || moments, rollout) == o);
        }
      }
  const auto both = legal_transitions(true, true, true, true);
  for (const std::string_view name : transition_names())
    CHECK(std::count(both.begin(), both.end(), *transition_from(name, true, true)) == 1);
}

}  // namespace hotbunk
