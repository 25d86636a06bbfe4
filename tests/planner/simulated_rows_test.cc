// Whatever plans, simulates: every row of the published tables that is priced, every scenario of scenarios/ and every
// launch that is written out becomes a plan of priced blocks or a lowered one, plays, and takes what the closed form
// says.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "lowering/lower.h"
#include "planner/validate/validate_tables.h"
#include "spec/validate.h"
#include "tests/paths.h"
#include "tests/planner/played.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// With HOTBUNK_ROW_TIMES: CPU-seconds of each row, for whoever measures.
void report(const std::string& row, double since) {
  if (std::getenv("HOTBUNK_ROW_TIMES") != nullptr) fmt::print("{:8.3f} s  {}\n", cpu_seconds() - since, row);
}

std::vector<std::filesystem::path> scenarios_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".yaml") out.push_back(entry.path());
  std::ranges::sort(out);
  return out;
}

Scenario with_fixed_lengths(Scenario s) {
  for (LengthSpec* lengths : {&s.workload.prompt_tokens, &s.workload.response_tokens}) {
    lengths->mean = std::max(1.0, std::round(lengths->mean));
    lengths->max = lengths->mean, lengths->distribution = LengthDistribution::fixed;
  }
  return s;
}

/// Plays an iteration of a scenario, its lengths as they are; with lengths that are all the mean, phases are the closed
/// form's within the table of docs/simulate-and-compare.md.
void check_scenario(const std::string& name, const Scenario& given) {
  INFO(name);
  const double begin = cpu_seconds();
  const auto pricer = pricer_for(given);
  if (unsupported_to_execute(given).empty()) {
    auto plan = lower(given);
    if (!plan) FAIL(render(plan.error()));
    const Played lowered = play({given, std::move(*plan)}, pricer->train().cost(), given.cluster.ranks_per_device == 1);
    CHECK(lowered.seconds[static_cast<std::size_t>(RlPhase::train)] > 0.0);
    return report(name, begin);
  }
  const auto job = priced_job(*pricer);
  if (!job) FAIL_CHECK(render(job.error()));
  if (!job) return;
  const Played drawn = play(*job, pricer->train().cost(), true);
  CHECK(drawn.seconds[static_cast<std::size_t>(RlPhase::train)] > 0.0);
  report(name, begin);
  const auto fixed_pricer = pricer_for(with_fixed_lengths(given));
  const RlPoint point = fixed_pricer->point();
  if (fixed_pricer->why_unpriced(point) || !fixed_pricer->rl().parts(point).rollout.fits) return;
  const auto fixed_job = priced_job(*fixed_pricer);
  REQUIRE(fixed_job.has_value());
  const Played played = play(*fixed_job, fixed_pricer->train().cost(), true);
  const RlPrice price = fixed_pricer->price(point);
  // Sequences that grow at one pace need more of the pool at their ends than on average: then some are put off.
  const bool preempts = std::ranges::any_of(played.trace.metrics, [](const auto& row) {
    const auto at = row.values.find("rollout/preemptions");
    return at != row.values.end() && at->second > 0.0;
  });
  for (const RlPhase p : {RlPhase::rollout, RlPhase::reference, RlPhase::old_logprobs, RlPhase::values, RlPhase::critic,
                          RlPhase::train, RlPhase::framework}) {
    const auto at = static_cast<std::size_t>(p);
    INFO(name_of(p) << ": simulated " << played.seconds[at] << " s, priced " << price.seconds[at] << " s");
    const double bound = p == RlPhase::rollout && preempts ? 0.14 : 0.03;
    CHECK(std::abs(played.seconds[at] - price.seconds[at]) <= bound * price.seconds[at]);
  }
}

}  // namespace

TEST_CASE("every scenario and every launch that is written out simulates") {
  for (const char* folder : {"scenarios", "data/published/launches"})
    for (const auto& file : scenarios_in(std::filesystem::path(source_folder) / folder)) {
      auto s = load_scenario(file, {});
      if (!s) FAIL(render(s.error()));
      check_scenario(file.stem().string(), *s);
    }
}

TEST_CASE("every row of the published tables that has a price simulates, and takes what its price says") {
  ValidationContext context(catalog_root());
  REQUIRE(validate_published(std::filesystem::path(source_folder) / "data" / "published", context).has_value());
  REQUIRE(context.iterations.size() > 15);
  for (const auto& row : context.iterations) check_scenario(row.label, row.scenario);
  REQUIRE(context.trained.size() > 500);
  double worst_ahead = 0.0, worst_behind = 0.0;
  for (const auto& [model, p] : context.trained) {
    const double begin = cpu_seconds();
    ClusterSpec cluster;
    cluster.gpu.nvlink_bandwidth = {1.0, "any"};
    cluster.gpus_per_node = model.cost().ranks_per_node();
    cluster.nodes = (p.ranks() + cluster.gpus_per_node - 1) / cluster.gpus_per_node;
    const std::string row = fmt::format("{} on {}: {}", model.model().name, p.ranks(), describe(p));
    INFO(row);
    const PricedJob job = priced_training(model, p, cluster);
    const Played played = play(job, model.cost(), true);
    report(row, begin);
    const double simulated = played.seconds[static_cast<std::size_t>(RlPhase::train)],
                 priced = model.price(p).step_seconds, error = simulated / priced - 1.0;
    INFO("simulated " << simulated << " s, priced " << priced << " s, " << 100.0 * error << " %");
    worst_ahead = std::max(worst_ahead, error), worst_behind = std::min(worst_behind, error);
    CHECK(std::abs(error) < (p.pp > 1 ? 0.055 : 0.03));
  }
  if (std::getenv("HOTBUNK_ROW_TIMES") != nullptr)
    fmt::print("{} rows, {:+.2f} to {:+.2f} %\n", context.trained.size(), 100.0 * worst_behind, 100.0 * worst_ahead);
}

}  // namespace hotbunk
