// P1 and P2: what the simulator says of a plan beside what came of it when it was executed.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "exec/length_driver.h"
#include "graph/verify.h"
#include "sim/sim_backend.h"
#include "trace/compare.h"

namespace hotbunk::testing {

/// Every op takes a microsecond, in virtual time.
struct UnitCost final : OpCost {
  std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const override { return 1000; }
};

/// Simulates all ranks of the plan, with samples of these lengths.
inline Result<Trace> simulate(const Plan& plan, const Scenario& scenario, std::vector<SampleLengths> lengths) {
  auto driver = LengthDriver::create(plan, scenario, std::move(lengths));
  if (!driver) return fail(driver.error());
  const UnitCost cost;
  SimBackend sim(scenario.cluster, cost);
  RunOptions run{.steps = static_cast<std::int32_t>(scenario.steps), .local_ranks = {}};
  for (Rank r = 0; r < plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  return execute(plan, sim, **driver, run);
}

/// "" when the verifier accepts the plan and every byte and call of `measured` is as simulated; else the first fault or
/// difference.
inline std::string unlike_simulated(const Plan& plan, const Scenario& scenario, std::vector<SampleLengths> lengths,
                                    const Trace& measured) {
  if (const auto faults = verify(plan); !faults.empty()) return "verifier: " + faults.front();
  const auto simulated = simulate(plan, scenario, std::move(lengths));
  if (!simulated) return "simulation: " + render(simulated.error());
  const Comparison c = compare_traces(plan, *simulated, measured);
  if (c.equal && c.numbers_compared > 100) return "";
  return c.equal ? "too little was compared" : "comparison: " + render_comparison(c, false);
}

}  // namespace hotbunk::testing
