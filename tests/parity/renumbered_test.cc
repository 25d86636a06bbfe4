// A run counts, feeds and verifies the same whatever numbers the plan's streams, sections and group families have.
#include "tests/renumbered.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/parity/harness.h"
#include "trace/summary.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

/// Memory, traffic, losses and rewards of a run, by name.
std::string counted(const Outcome& o) {
  auto summary = summarize(o.plan, o.job.scenario, o.measured);
  std::vector<std::string> rows;
  for (const auto& row : summary.at("traffic")) rows.push_back(json_text(row));
  std::ranges::sort(rows);
  for (const auto& row : summary.at("metrics"))
    rows.push_back(fmt::format("step {}: loss {}, reward {}", json_text(row.at("step")), json_text(row.at("loss")),
                               json_text(row.at("reward"))));
  return fmt::format("{}\n{}", json_text(summary.at("memory")), fmt::join(rows, "\n"));
}

}  // namespace

TEST_CASE("a run of a plan with other numbers is the same run: counters, losses, hashes of its syncs") {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const std::vector<std::string>& sets) {
    cases.push_back({name, tiny_scenario(4, 2, sets)});
    for (const std::uint64_t seed : {1, 2})
      cases.push_back(
          {name, tiny_scenario(4, 2, sets), [seed](Plan& plan) { plan = hotbunk::test::renumbered(plan, seed); }});
  };
  add("FSDP", {"sync.verify=true", "algorithm.reference=true"});
  add("pipeline",
      {"train.layout={dp: 2, pp: 2}", "train.pipeline_split=[2, 1]", "train.engine=zero1", "sync.verify=true"});
  add("tensor", {"train.layout={dp: 2, tp: 2, sp: true}", "sync.transport=collective", "sync.verify=true"});
  add("stages of engines", {"rollout.layout={tp: 1, pp: 2, dp: 2}", "model.num_hidden_layers=4", "sync.verify=true"});
  add("ulysses", {"train.layout={dp: 2, ulysses: 2}", "rollout.sleep_level=1", "sync.verify=true"});
  add("context", {"train.layout={dp: 2, cp: 2}", "checkpoint_every=1", "sync.verify=true"});
  std::map<std::string, std::string> first;
  const auto check = [&](const Outcome& o) -> std::string {
    if (std::string bad = complaint(o, o.plan); !bad.empty()) return bad;
    const std::string found = counted(o), expected = first.try_emplace(o.job.name, found).first->second;
    return found == expected ? "" : fmt::format("with other numbers\n{}\nnot\n{}", found, expected);
  };
  CHECK(run_cases(4, cases, check) == "");
}
