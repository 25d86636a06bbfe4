// explain's trees say of every byte and every second what it is: parts make up their parents on every level.
#include "planner/answers/trees.h"

#include <catch2/catch.hpp>

#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

struct Case {
  std::string file;
  std::vector<std::string> sets;
};

std::vector<Case> cases() {
  const std::string seven = "qwen2.5-7b-colocated.yaml", big = "deepseek-v3-megatron.yaml";
  return {{seven, {}},
          {"qwen2.5-7b-ulysses.yaml", {}},
          {"qwen2.5-32b-megatron.yaml", {}},
          {"llama-3.1-70b-megatron.yaml", {}},
          {big, {}},
          {seven, {"transition=slime"}},
          {seven, {"sync.mode=stream"}},
          {seven, {"sync.mode=broadcast"}},
          {seven, {"sync.mode=direct"}},
          {seven, {"algorithm.name=ppo"}},
          {seven, {"algorithm.name=ppo", "train.offload=none"}},
          {seven, {"algorithm.name=sft"}},
          {seven, {"train.offload=none", "rollout.sleep=false", "rollout.memory_fraction=0.3"}},
          {seven, {"rollout.sleep_level=1"}},
          {seven, {"train.offload=layerwise"}},
          {seven, {"rollout.engine=hotbunk"}},
          {seven, {"rollout.layout={tp: 2, pp: 4, dp: 1}"}},
          {seven, {"rollout.engine=vllm", "rollout.layout={tp: 2, cp: 2, dp: 2}"}},
          {seven, {"rollout.engine=hotbunk", "sync.transport=collective", "sync.verify=true"}},
          {seven, {"placement=disaggregated", "train.layout={dp: 4}", "rollout.layout={tp: 2, dp: 2}"}},
          {seven,
           {"placement=disaggregated", "train.layout={dp: 4}", "rollout.layout={tp: 2, dp: 2}",
            "rollout.memory_fraction=0.2", "algorithm.max_staleness=1"}}};
}

/// The same number on every level: of the children, where there are any.
void check_sums(const CostNode& n, double CostNode::*value) {
  if (n.children.empty()) return;
  double sum = 0.0;
  for (const CostNode& c : n.children) {
    INFO(n.name << " / " << c.name);
    CHECK((c.*value > 0.0 || c.name == "overlapped"));
    sum += c.*value;
    check_sums(c, value);
  }
  INFO(n.name);
  CHECK(sum == Approx(n.*value).epsilon(1e-9));
}

}  // namespace

TEST_CASE("explain's trees: parts make up their parents, nothing is left unsaid") {
  for (const Case& c : cases()) {
    INFO(c.file << " " << (c.sets.empty() ? "" : c.sets.back()));
    auto s = load_scenario(std::filesystem::path(source_folder) / "scenarios" / c.file, c.sets);
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const RlPoint p = (*pricer)->point();
    const RlPrice price = (*pricer)->price(p);
    REQUIRE(price.iteration_seconds > 0);
    const TrainPrice train = (*pricer)->train().price(p.train);

    const CostNode time = time_tree(**pricer, p, price, train);
    CHECK(time.seconds == price.iteration_seconds);
    check_sums(time, &CostNode::seconds);
    for (const CostNode& phase : time.children) {
      INFO(phase.name);
      CHECK((!phase.children.empty() || phase.name == "overlapped"));
      if (phase.name != "rollout") continue;
      for (const CostNode& part : phase.children) CHECK((!part.children.empty() || part.name == "exchange"));
    }

    // Moments follow each other: the root is the highest of them.
    const CostNode memory = memory_tree(**pricer, p, price, train);
    double highest = 0.0;
    for (const CostNode& moment : memory.children) {
      INFO(moment.name);
      highest = std::max(highest, moment.bytes);
      CHECK_FALSE(moment.children.empty());
      check_sums(moment, &CostNode::bytes);
    }
    CHECK(memory.bytes == highest);
  }
}

}  // namespace hotbunk
