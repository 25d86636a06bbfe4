// Hand-built plans (tests/toy_plan.h) for the simulator's tests: the cost of each op in nanoseconds in a table beside
// it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "exec/backend.h"
#include "sim/sim_backend.h"
#include "tests/toy_plan.h"

namespace hotbunk::toy {

/// Price by the op's name; what is not named is free.
struct Prices final : OpCost {
  std::map<std::string, std::int64_t> by_name;
  Prices(std::initializer_list<std::pair<const std::string, std::int64_t>> prices) : by_name(prices) {}
  std::int64_t nanoseconds(const Plan&, Rank, const Op& o, const Args&) const override {
    const auto at = by_name.find(o.name);
    return at == by_name.end() ? 0 : at->second;
  }
};

inline ClusterSpec one_rank_per_device() { return {}; }

/// How often and with which sizes each phase's block runs on each rank of an iteration.
struct Fixed : Driver {
  std::int64_t runs = 1;
  Sizes sizes;
  std::map<std::pair<Rank, std::int16_t>, std::int64_t> done;
  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    std::int64_t& n = done[{r, phase}];
    if (n == runs) return n = 0, std::nullopt;
    ++n;
    Args args;
    args.step = step;
    args.sizes = sizes;
    return args;
  }
  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte>) override {}
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte>) override {}
  void completed(Rank, const Args&, std::int16_t) override {}
  bool wants_results() const override { return false; }
  void report(Trace&) const override {}
};

/// Walks the plan as `execute` does: one iteration per step, `runs` runs of every block per phase.
inline Result<Trace> simulate(Plan& plan, const OpCost& cost, std::int64_t runs = 1, std::int32_t steps = 1,
                              SimOptions options = {}, const ClusterSpec& cluster = one_rank_per_device(),
                              Sizes sizes = {}) {
  for (PhaseInfo& phase : plan.phases) phase.driven = true;
  SimBackend backend(cluster, cost, options);
  Fixed driver;
  driver.runs = runs;
  driver.sizes = sizes;
  RunOptions run;
  run.steps = steps;
  for (Rank r = 0; r < plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  return execute(plan, backend, driver, run);
}

/// The spans of an op, in order of rank and time: {start, end}.
inline std::vector<std::pair<std::int64_t, std::int64_t>> times(const Trace& trace, const std::string& name) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (const Span& s : trace.spans)
    if (trace.names[static_cast<std::size_t>(s.name)] == name) out.emplace_back(s.start_ns, s.end_ns);
  return out;
}
using Times = std::vector<std::pair<std::int64_t, std::int64_t>>;

}  // namespace hotbunk::toy
