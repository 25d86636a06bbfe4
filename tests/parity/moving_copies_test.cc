// What puts a section to sleep and wakes it moves pages; nothing else does.
#include "backends/cpu_gloo/moving_copies.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <memory>

#include "backends/cpu_gloo/arena.h"
#include "graph/bound.h"
#include "lowering/lower.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

TEST_CASE("the copies that move are those of sections that sleep and wake") {
  // Parameters sleep before the sync, which copies of the host what stays there.
  const Scenario s = tiny_scenario(
      2, 2,
      {"rollout.sleep_level=1", "algorithm.reference=true",
       "transition=[sleep_optimizer, sleep_train, wake_rollout, sync, wake_kv, rollout, sleep_rollout, wake_train]"});
  const auto plan = lower(s);
  REQUIRE(plan);
  for (const Program& program : plan->programs) {
    const MovingCopies moving(program);
    int moves = 0, copies = 0;
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          if (op->kind != OpKind::copy) return;
          INFO(op.name());
          CHECK(moving.contains(op) == (block.enters != Enters::nothing));
          ++(block.enters != Enters::nothing ? moves : copies);
        });
    CHECK(moves > 0);
    CHECK(copies > 0);
    std::vector<std::string> sections;
    for (const SectionId id : moving.host_sections()) sections.push_back(program.section(id).name);
    CHECK(sections == std::vector<std::string>{"host_params", "host_optimizer", "host_reference", "host_weights"});
  }
}

TEST_CASE("asleep, whole pages of parameters and moments are lent to the host's arena; awake, none") {
  // Beside each buffer a page is copied in parts at both ends at most.
  for (const int world : {1, 2}) {
    const Scenario s = tiny_scenario(world, 1, {"steps=2"});
    const auto seen = std::make_shared<int>(0);
    const Case job{"moved", s, {}, [=](const CpuBackend& b, std::int32_t, const std::string& phase) -> std::string {
                     const std::int64_t lent = b.device_arena().lent_bytes();
                     if (phase == "old_logprobs" && lent != 0) return fmt::format("{} bytes are away", lent);
                     if (phase == "export" && *seen != 2) return fmt::format("looked {} times", *seen);
                     if (phase != "wake_kv") return "";
                     ++*seen;
                     return lent > 0 ? "" : "nothing moved";
                   }};
    CHECK(run_cases(world, {job}, [](const Outcome&) { return std::string(); }) == "");
  }
}
