// Ranks share what they have alike; each still has the program that it would have alone.
#include "lowering/rank_programs.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// "" or the first rank whose program in the plan is not the one written for it alone.
std::string differs(const Scenario& s) {
  const Plan plan = lowered(s);
  const RankPrograms ranks(s, plan, Purpose::job, kv_pool_blocks(s).value());
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    if (!(plan.program(r) == ranks.lower_alone(r))) return fmt::format("rank {}", r);
  return "";
}

}  // namespace

TEST_CASE("What ranks share is what each would have alone") {
  const std::vector<std::vector<std::string>> settings = {
      {},
      {"sync.verify=true"},
      {"sync.transport=collective", "algorithm.reference=true"},
      {"rollout.sleep_level=2", "train.reshard_after_forward=false"},
      {"train.offload=none", "rollout.sleep=false", "train.precision.params=bf16"},
      {"rollout.layout.order=strided", "train.recompute=full"},
      // More ranks than rows: the last ones own nothing of some parameters.
      {"model.vocab_size=5"}};
  for (const auto& [world, tp] : {std::pair{1, 1}, {2, 1}, {2, 2}, {3, 1}, {4, 2}, {8, 4}, {8, 2}})
    for (const auto& sets : settings) {
      INFO(fmt::format("{} ranks, tp {}, {}", world, tp, sets.empty() ? "" : sets.front()));
      CHECK(differs(tiny(world, tp, sets)) == "");
    }
}

TEST_CASE("Ranks share the ops in which they do not differ") {
  const auto shared = [](const Plan& plan, Rank a, Rank b, const char* name) {
    const auto phase = static_cast<std::size_t>(plan.phase_index(name));
    return plan.program(a).phases[phase][0].ops.shares(plan.program(b).phases[phase][0].ops);
  };
  const Plan plan = lowered(tiny(4, 2, {"model.vocab_size=34"}));
  REQUIRE(plan.programs.size() == 4);  // each loads rows of its own
  const auto shares = [&](Rank a, Rank b, const char* name) { return shared(plan, a, b, name); };
  CHECK(plan.program(0).buffers.shares(plan.program(3).buffers));
  CHECK(shares(0, 3, "train"));
  CHECK_FALSE(shares(0, 3, "load"));
  CHECK_FALSE(shares(0, 1, "rollout"));  // another slice of the vocabulary
  CHECK(shares(1, 3, "rollout"));        // the same seat of another engine
  // 33 rows do not divide by tp 2: the second seat fills up its last row in every sync, an op that the first lacks.
  const Plan uneven = lowered(tiny(4, 2));
  CHECK_FALSE(shared(uneven, 0, 1, "train"));
  CHECK(shared(uneven, 1, 3, "train"));
}

TEST_CASE("A program that changes takes its ops from those that share them") {
  Plan plan = lowered(tiny(2, 1));
  const Plan before = plan;
  const auto train = static_cast<std::size_t>(plan.phase_index("train"));
  const Program& other = before.programs[1];
  plan.programs[0].phases[train][0].ops.front().name = "changed";
  CHECK(plan.programs[0].phases[train][0].ops.front().name == "changed");
  CHECK(plan.programs[1] == other);
  CHECK_FALSE(plan == before);
  CHECK(plan_hash(plan) != plan_hash(before));
  Plan apart = before;  // the same content, nothing shared
  for (Program& p : apart.programs)
    for (auto& blocks : p.phases)
      for (Block& block : blocks) block.ops = std::vector<Op>(block.ops.begin(), block.ops.end());
  CHECK_FALSE(apart.programs[0].phases[train][0].ops.shares(apart.programs[1].phases[train][0].ops));
  CHECK(apart == before);
  CHECK(plan_hash(apart) == plan_hash(before));
}
