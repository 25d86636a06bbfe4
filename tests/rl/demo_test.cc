// The demo scenario as it is shipped: it loads, its task fits, and its lowered plan can be driven to the end.
#include <catch2/catch.hpp>

#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "lowering/sample_rows.h"
#include "rl/rl_driver.h"
#include "spec/loader.h"
#include "tests/blocks.h"
#include "tests/paths.h"

using namespace hotbunk;

namespace {

/// Capacities of a block's tokens and sequences: the largest of its tensors' symbolic dimensions.
Sizes capacity_of(const Program& program, const Block& block) {
  Sizes capacity;
  for (const Op& op : test::ops_of(program, block))
    for (const auto* tensors : {&op.inputs, &op.outputs})
      for (const Tensor& t : *tensors)
        for (const Dim& d : t.shape) {
          if (d.extent == tokens_extent) capacity.tokens = std::max(capacity.tokens, d.begin + d.size);
          if (d.extent == seqs_extent) capacity.seqs = std::max(capacity.seqs, d.begin + d.size);
        }
  return capacity;
}

}  // namespace

TEST_CASE("the demo scenario's plan has room for whatever its drivers decide") {
  const auto scenario = load_scenario(std::string(source_folder) + "/scenarios/demo.yaml");
  if (!scenario) FAIL(render(scenario.error()));
  const auto plan = lower(*scenario);
  if (!plan) FAIL(render(plan.error()));
  const auto task = Task::create(*scenario);
  REQUIRE(task);
  CHECK(task->prompt_tokens() == max_prompt_tokens(*scenario));
  CHECK(task->answer_tokens() == max_response_tokens(*scenario));
  CHECK(RlDriver::create(*plan, *scenario, {}).has_value());

  auto driver = LengthDriver::create(*plan, *scenario);
  REQUIRE(driver);
  std::int64_t blocks_run = 0, trained = 0;
  for (Rank rank = 0; rank < plan->num_ranks(); ++rank)
    for (std::size_t p = 0; p < plan->phases.size(); ++p) {
      const auto phase = static_cast<std::int16_t>(p);
      while (const auto args = (*driver)->next(rank, 1, phase)) {
        const auto& blocks = plan->program(rank).phases[p];
        REQUIRE(static_cast<std::size_t>(args->block) < blocks.size());
        const Block& block = blocks[static_cast<std::size_t>(args->block)];
        const Sizes capacity = capacity_of(plan->program(rank), block);
        CHECK(args->sizes.tokens <= capacity.tokens);
        if (capacity.seqs > 0) CHECK(args->sizes.seqs <= capacity.seqs);
        if (plan->phases[p].name == "train") trained += args->sizes.tokens;
        ++blocks_run;
        if (!plan->phases[p].driven) break;
      }
    }
  CHECK(trained == num_samples(*scenario) * max_sample_tokens(*scenario));
  CHECK(blocks_run > 4 * 20);
}
