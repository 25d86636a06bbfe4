// Any legal order of sleep, wake and sync does the default's work: its tokens and weights bit for bit, bytes and calls
// as simulated, nothing resident that sleeps. Each sync is verified as it runs (sync.verify).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <random>

#include "base/hash.h"
#include "graph/verify.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"
#include "lowering/lower.h"
#include "tests/drawn_transition.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

std::string state_hash(const CpuBackend& backend, const ModelSpec& model, int world) {
  Hasher h;
  for (const ShardedUnit& u : train_units(model, 1, world, 0))
    for (const char* what : {"shard", "exp_avg", "exp_avg_sq"}) {
      const auto bytes = backend.peek(fmt::format("train.{}.{}", u.name, what));
      if (bytes.empty()) return "asleep";
      h.add(bytes);
    }
  return h.hex();
}

/// What all cases of one world must agree in, as far as they are of one `kind`.
struct Agreement {
  std::map<std::string, std::string> weights;                 // final, of this rank
  std::map<std::string, std::uint64_t> fed;                   // to this rank: prompts, samples' tokens, advantages
  std::map<std::string, std::vector<SampleLengths>> lengths;  // on rank 0
};

/// Compares what was fed, bit for bit, and the trained state at the end with those of the first case of its kind.
Case agreeing(std::string kind, std::string name, Scenario s, int world, const std::shared_ptr<Agreement>& all) {
  Case job{std::move(name), std::move(s)};
  job.before_phase = [kind, world, all, model = job.scenario.model](const CpuBackend& b, std::int32_t,
                                                                    const std::string& phase) -> std::string {
    if (phase != "export") return "";
    const std::string found = state_hash(b, model, world);
    const auto [first, is_first] = all->weights.try_emplace(kind, found);
    if (found == "asleep" || found != first->second) return fmt::format("other weights: {}, {}", found, first->second);
    return "";
  };
  job.all_fed = [kind, all](std::uint64_t fed) -> std::string {
    if (fed == 0) return "nothing was fed";
    const auto [first, is_first] = all->fed.try_emplace(kind, fed);
    return fed == first->second ? "" : "other tokens or advantages";
  };
  return job;
}

/// P1 and P2, and the lengths that the samples of the kind's first case had.
Check parity_and_lengths(const std::shared_ptr<Agreement>& all, const std::string& kind) {
  return [all, kind](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    const auto [first, is_first] = all->lengths.try_emplace(kind, o.lengths);
    return first->second == o.lengths ? "" : "other lengths";
  };
}

CpuOptions resident_checked() {
  CpuOptions o;
  o.check_resident = o.poison = o.check_order = true;
  return o;
}

using Sets = std::vector<std::string>;
Sets operator+(Sets a, const Sets& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("slime's order, verl's and random legal ones do bit for bit what the default does") {
  for (int world : {2, 4}) {
    const auto all = std::make_shared<Agreement>();
    const Sets common = {"steps=3", "sync.verify=true", "algorithm.reference=true", "algorithm.kl_coef=0.1",
                         fmt::format("sync.transport={}", world == 2 ? "collective" : "ipc")};
    std::vector<Case> cases;
    const auto add = [&](const std::string& name, const Sets& sets) {
      cases.push_back(agreeing("one", name, tiny_scenario(world, 2, common + sets), world, all));
    };
    add("default", {});
    for (const char* system : {"slime", "verl", "verl-old"}) add(system, {fmt::format("transition={}", system)});
    std::mt19937_64 random(20261122 + static_cast<std::uint64_t>(world));
    for (int i = 0; i < 5; ++i) {
      const DrawnTransition drawn = draw_transition([&](std::size_t n) { return random() % n; }, true, true);
      add(to_text(drawn.order), drawn.sets() + Sets{fmt::format("rollout.sleep_level={}", 1 + random() % 2)});
    }
    CHECK(run_cases(world, cases, parity_and_lengths(all, "one"), resident_checked()) == "");
  }
}

TEST_CASE("a sync from the host is exact in bf16, through small buckets, on one rank") {
  for (int world : {1, 3}) {
    const auto all = std::make_shared<Agreement>();
    std::vector<Case> cases;
    for (const char* order : {"hotbunk", "slime"})
      cases.push_back(agreeing("one", order,
                               tiny_scenario(world, 1,
                                             {"train.precision.params=bf16", "rollout.dtype=bf16", "sync.verify=true",
                                              "sync.bucket_mib=0.001", fmt::format("transition={}", order)}),
                               world, all));
    CHECK(run_cases(world, cases, parity_and_lengths(all, "one"), resident_checked()) == "");
  }
}

namespace {

/// The rollout's weights when it begins: kept from a sync to the next, and those of training then.
struct Kept {
  std::map<std::int32_t, std::string> by_step;

  std::string operator()(const CpuBackend& b, const Scenario& s, std::int32_t step, const std::string& phase) {
    if (phase == "export" && by_step.size() != static_cast<std::size_t>(s.steps)) return "not every rollout was seen";
    if (phase != "rollout") return "";
    Hasher h;
    for (const LocalWeight& w : rollout_weights(s.model, 2, 0)) h.add(b.peek("rollout." + w.name));
    by_step[step] = h.hex();
    if (step == 1) return "";
    const bool synced = (step - 1) % s.sync.every == 0, same = by_step[step] == by_step[step - 1];
    return synced == same ? fmt::format("step {}: the rollout has {} weights", step, same ? "the same" : "new") : "";
  }
};

}  // namespace

TEST_CASE("a sync every other iteration: between two the rollout keeps its weights, however it sleeps") {
  const auto all = std::make_shared<Agreement>();
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const Sets& sets) {
    const Scenario s =
        tiny_scenario(2, 2, Sets{"steps=5", "sync.every=2", "sync.verify=true", "optimizer.lr=0.01"} + sets);
    Case job = agreeing("every 2", name, s, 2, all);
    job.before_phase = [s, at_end = job.before_phase, kept = std::make_shared<Kept>()](
                           const CpuBackend& b, std::int32_t step, const std::string& phase) {
      const std::string bad = (*kept)(b, s, step, phase);
      return bad.empty() ? at_end(b, step, phase) : bad;
    };
    cases.push_back(std::move(job));
  };
  add("weights sleep in host memory", {"rollout.sleep_level=1"});
  add("nothing of the rollout sleeps", {"rollout.sleep=false"});
  add("nothing sleeps", {"rollout.sleep=false", "train.offload=none"});
  add("the KV cache alone sleeps", {"transition=sleep_optimizer-sync-sleep_train-wake_kv-rollout-sleep_kv-wake_train"});
  add("flushed", {"rollout.sleep=false", "train.offload=none", "transition=sync-flush-rollout"});
  add("slime", {"rollout.sleep_level=1", "transition=slime"});
  add("verl", {"rollout.sleep_level=1", "transition=verl"});
  CHECK(run_cases(2, cases, parity_and_lengths(all, "every 2"), resident_checked()) == "");
}

TEST_CASE("parameters that wake for the sync alone stay asleep where there is none") {
  const Plan plan = *lower(tiny_scenario(2, 2, {"transition=verl", "sync.every=3", "rollout.sleep_level=1"}));
  for (const PhaseInfo& p : plan.phases) {
    INFO(p.name);
    CHECK((p.every == 3) == (p.name == "wake_params" || p.name == "sync" || p.name == "sleep_train_again"));
    CHECK(p.runs_in(1, 1));
    CHECK(p.runs_in(4, 1));
    CHECK(p.runs_in(2, 1) == (p.every == 1));
    CHECK(p.runs_in(6, 6));  // a resumed run's first
  }
}

TEST_CASE("the verifier knows iterations without a sync") {
  // Weights that are dropped are not there in the iteration that follows: validation refuses it (E225), and so does the
  // verifier where nobody asked.
  Scenario s = tiny_scenario(2, 2);
  s.sync.every = 2;
  CHECK_THROWS_WITH(lower(s), Catch::Contains("phase rollout") && Catch::Contains("nobody wrote"));
  // Periods of two lengths, of a driven phase, of none.
  const auto first_fault = [](std::int32_t sync, const char* other, std::int32_t every) {
    Plan p = *lower(tiny_scenario(2, 2, {"rollout.sleep_level=1"}));
    p.phases[static_cast<std::size_t>(p.phase_index("sync"))].every = sync;
    p.phases[static_cast<std::size_t>(p.phase_index(other))].every = every;
    const auto found = verify(p);
    return found.empty() ? "" : found.front();
  };
  CHECK_THAT(first_fault(2, "wake_kv", 3), Catch::Contains("runs every 3 iterations, another phase every 2") ||
                                               Catch::Contains("runs every 2 iterations, another phase every 3"));
  CHECK_THAT(first_fault(1, "rollout", 2), Catch::Contains("driven"));
  CHECK_THAT(first_fault(1, "load", 2), Catch::Contains("every 2 is for phases of iterations"));
  CHECK_THAT(first_fault(0, "load", 1), Catch::Contains("every 0"));
}
