// An iteration on the double beside the simulator and beside one rank of the CPU backend.
#pragma once
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lowering/lower.h"
#include "tests/cuda_backend/iteration.h"
#include "tests/simulated.h"

namespace hotbunk::test {

using Sets = std::vector<std::string>;

struct Planned {
  Scenario scenario;
  Plan plan;
};
/// None where the scenario did not load or cannot be lowered, which fails the test.
inline std::optional<Planned> planned(Result<Scenario> scenario) {
  auto plan = scenario ? lower(*scenario) : Result<Plan>(fail(scenario.error()));
  if (plan) return Planned{std::move(*scenario), std::move(*plan)};
  UNSCOPED_INFO(render(plan.error()));
  CHECK(false);
  return {};
}

/// What makes a scenario of scenarios/ a matter of seconds on the double. Experts and heads keep their numbers.
inline Sets shortened() {
  return {"steps=1",
          "cluster.ranks_per_device=2",
          "train.layout.dp=2",
          "train.layout.tp=1",
          "train.layout.sp=false",
          "train.micro_batch_tokens=24",
          "rollout.layout.tp=2",
          "rollout.layout.dp=1",
          "rollout.max_running_requests=4",
          "rollout.max_prefill_tokens=20",
          "task.digits=2",
          "workload.prompt_tokens.mean=4",
          "workload.prompt_tokens.max=4",
          "algorithm.prompts=2",
          "algorithm.samples_per_prompt=2",
          "workload.response_tokens.mean=3",
          "workload.response_tokens.max=3"};
}

/// The same model and samples on one rank.
inline Sets on_one_rank(Sets sets) {
  for (const char* set :
       {"cluster.ranks_per_device=1", "train.engine=fsdp2", "train.layout={dp: 1}", "train.pipeline_split=[]",
        "train.pipeline_schedule=1f1b", "train.expert_capacity=0", "train.expert_dispatch=per-expert",
        "optimizer.cpu_fraction=0", "rollout.layout={tp: 1, dp: 1}"})
    sets.emplace_back(set);
  return sets;
}

/// The double's, without a finding, its bytes and calls as simulated (P1, P2).
inline Iteration checked_iteration(const Planned& job, std::uint64_t seed = 1) {
  const Iteration it = run_iteration(job.plan, job.scenario, {.seed = seed});
  CHECK_THAT(it.text(), Catch::Equals(""));
  CHECK_THAT(it.numbers, Catch::Contains("loss"));
  if (it.went_well())
    CHECK_THAT(hotbunk::testing::unlike_simulated(job.plan, job.scenario, it.lengths, it.trace), Catch::Equals(""));
  return it;
}

/// Figures of how an engine went about its samples: of its layout, not of what was sampled.
inline bool is_of_engine(const std::string& figure) {
  return figure == "rollout/prefill_steps" || figure == "rollout/decode_steps" || figure == "rollout/max_kv_blocks";
}

/// The same tokens; figures agree as far as fp32 sums in another order do (P3).
inline void check_like(const Iteration& ours, const Iteration& theirs) {
  CHECK(theirs.samples.size() == 4);
  CHECK(ours.samples == theirs.samples);
  REQUIRE(ours.trace.metrics.size() == theirs.trace.metrics.size());
  for (std::size_t step = 0; step < ours.trace.metrics.size(); ++step)
    for (const auto& [name, value] : theirs.trace.metrics[step].values) {
      if (is_of_engine(name)) continue;
      const double mine = ours.trace.metrics[step].values.at(name);
      INFO("step " << step + 1 << ", " << name << ": " << mine << ", of one CPU rank " << value);
      // Losses may be differences of numbers near one, gaps are between log-probs of rollout and training.
      const double absolute = name.starts_with("rollout/logprob_gap") ? 2e-6 : 1e-7;
      CHECK(std::abs(mine - value) <= 2e-5 * std::abs(value) + absolute);
    }
}

}  // namespace hotbunk::test
