#include "lowering/lower.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <set>

#include "graph/verify.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

using Names = std::vector<std::string>;

Names phases_of(const Plan& plan) {
  Names out;
  for (const PhaseInfo& p : plan.phases) out.push_back(p.name);
  return out;
}

Names blocks_of(const Plan& plan, std::string_view phase) {
  Names out;
  for (const Block& b : plan.program(0).phases[static_cast<std::size_t>(plan.phase_index(phase))])
    out.push_back(b.name);
  return out;
}

}  // namespace

TEST_CASE("Every setting that shapes a plan gives one that verifies") {
  const std::vector<Names> training = {{"train.recompute=none", "train.recompute=selective", "train.recompute=full"},
                                       {"train.reshard_after_forward=true", "train.reshard_after_forward=false"},
                                       {"train.loss_chunk_tokens=0", "train.loss_chunk_tokens=24"},
                                       {"algorithm.reference=false", "algorithm.reference=true"}};
  const std::vector<Names> rollout = {{"rollout.sleep=false", "rollout.sleep_level=1", "rollout.sleep_level=2"},
                                      {"train.offload=none", "train.offload=sleep"},
                                      {"sync.transport=ipc", "sync.transport=collective"},
                                      {"sync.verify=false", "sync.verify=true"}};
  for (const auto& [world, tp] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {2, 2}, {3, 1}, {4, 1}, {4, 2}, {4, 4}})
    for (const auto* keys : {&training, &rollout}) {
      std::vector<Names> grid = {{}};
      for (const Names& values : *keys) {
        std::vector<Names> wider;
        for (const Names& sets : grid)
          for (const std::string& value : values) wider.push_back(sets), wider.back().push_back(value);
        grid = std::move(wider);
      }
      // All of the grid where shards are uneven and where tp meets dp; elsewhere every fifth point of it, which visits
      // every value since no axis has five.
      const bool all = world == 3 || (world == 4 && tp == 2);
      for (std::size_t i = 0; i < grid.size(); i += all ? 1 : 5) {
        const Names& sets = grid[i];
        INFO(world << " ranks, tp " << tp << ": " << fmt::format("{}", fmt::join(sets, " ")));
        const Plan plan = lowered(tiny(world, tp, sets));
        CHECK(verify(plan) == Names{});
        CHECK(plan.num_ranks() == world);
      }
    }
}

TEST_CASE("Phases stand in the documented order") {
  CHECK(phases_of(lowered(tiny(2, 2))) == Names{"load", "sleep_optimizer", "wake_rollout", "sync", "sleep_train",
                                                "wake_kv", "rollout", "sleep_rollout", "exchange", "wake_train",
                                                "old_logprobs", "train", "checkpoint", "export"});
  CHECK(phases_of(lowered(tiny(2, 1, {"rollout.sleep=false", "train.offload=none", "algorithm.old_logprobs=false"}))) ==
        Names{"load", "start_rollout", "sync", "rollout", "exchange", "train", "checkpoint", "export"});
  const Plan both = lowered(tiny(1, 1, {"rollout.sleep_level=1", "algorithm.reference=true"}));
  CHECK(phases_of(both) == Names{"load", "start_rollout", "sleep_optimizer", "wake_rollout", "sync", "sleep_train",
                                 "wake_kv", "rollout", "sleep_rollout", "exchange", "wake_train", "reference",
                                 "old_logprobs", "train", "checkpoint", "export"});
  CHECK(blocks_of(both, "rollout") == Names{"prefill", "decode"});
  CHECK(blocks_of(both, "train") == Names{"begin", "micro", "step"});
  for (const PhaseInfo& p : both.phases) {
    INFO(p.name);
    CHECK(p.when == (p.name == "load" || p.name == "start_rollout" ? When::prologue
                     : p.name == "export"                          ? When::epilogue
                                                                   : When::iteration));
    const std::set<std::string> driven = {"rollout", "exchange",   "reference", "old_logprobs",
                                          "train",   "checkpoint", "export"};
    CHECK(p.driven == driven.contains(p.name));
  }
}

TEST_CASE("SFT has no rollout") {
  for (int world : {1, 3}) {
    const Plan plan = lowered(tiny(world, 1, {"algorithm.name=sft", "task.data=samples.jsonl", "task.name=''"}));
    CHECK(phases_of(plan) == Names{"load", "train", "checkpoint", "export"});
    CHECK(verify(plan) == Names{});
    for (const Buffer& b : plan.program(0).buffers) {
      CHECK(b.section != sections::rollout_weights);
      CHECK(b.section != sections::kv_cache);
    }
  }
}

TEST_CASE("Ranks find their groups: engines are neighbours, or strided over the ranks") {
  const Plan near = lowered(tiny(4, 2)), far = lowered(tiny(4, 2, {"rollout.layout.order=strided"}));
  for (const Plan* plan : {&near, &far}) {
    CHECK(plan->groups[0].name == "fsdp");
    CHECK(plan->groups[0].groups == std::vector<std::vector<Rank>>{{0, 1, 2, 3}});
  }
  CHECK(near.groups[1].groups == std::vector<std::vector<Rank>>{{0, 1}, {2, 3}});
  CHECK(far.groups[1].groups == std::vector<std::vector<Rank>>{{0, 2}, {1, 3}});
}

TEST_CASE("A setting that nothing lowers is refused with its reason") {
  const auto plan = lower([] {
    Scenario s = tiny(2, 1);
    s.sync.mode = SyncMode::broadcast;
    return s;
  }());
  REQUIRE_FALSE(plan.has_value());
  CHECK(plan.error()[0].code == "E250");
  CHECK_THAT(plan.error()[0].message, Catch::Matchers::Contains("sync.mode broadcast: bucketed is executed"));
}
