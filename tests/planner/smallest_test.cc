// `plan --gpus ?` against the obvious way: every count in turn, each searched in full.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "lowering/lower.h"
#include "planner/answers/answers.h"
#include "planner/answers/lowered_space.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

Scenario scenario_of(const std::string& model, std::int64_t per_node, const std::string& train,
                     const std::string& rollout, const std::vector<std::string>& sets) {
  auto s = load_scenario_text(
      fmt::format("model: {}\ncluster: {{gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: {}}}\ntrain: {{{}}}\n"
                  "rollout: {{{}}}\nalgorithm: {{prompts: 32, samples_per_prompt: 4}}\n"
                  "workload: {{prompt_tokens: {{mean: 64, max: 128}}, response_tokens: {{mean: 64, max: 128}}}}\n",
                  model, per_node, train, rollout),
      "smallest.yaml", sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

struct Fit {
  std::int64_t nodes = 0, gpus = 0;
  bool operator==(const Fit&) const = default;
};

constexpr double any_time = std::numeric_limits<double>::infinity();

/// Nothing skipped, nothing bounded: every count in turn, each searched once however often it is asked about.
class EveryCluster {
 public:
  EveryCluster(Scenario given, std::int64_t most, bool executes)
      : given_(std::move(given)), most_(most), executes_(executes) {}

  Fit first(double within = any_time) {
    const std::int64_t per_node = given_.cluster.gpus_per_node;
    for (std::int64_t gpus = 1; gpus <= most_ * per_node; gpus += gpus < per_node ? 1 : per_node) {
      const auto [at, is_new] = best_seconds_.try_emplace(gpus);
      if (is_new) at->second = searched(gpus);
      if (at->second && *at->second <= within) return {std::max<std::int64_t>(1, gpus / per_node), gpus};
    }
    return {};
  }

 private:
  /// Of the best layout on so many GPUs; none fits: nothing.
  std::optional<double> searched(std::int64_t gpus) const {
    Scenario s = given_;
    s.cluster.nodes = std::max<std::int64_t>(1, gpus / given_.cluster.gpus_per_node);
    s.cluster.gpus_per_node = std::min(gpus, given_.cluster.gpus_per_node);
    const auto pricer = ScenarioPricer::make(s, catalog_root());
    REQUIRE(pricer.has_value());
    const RlSetting& set = (*pricer)->rl().setting();
    SearchOptions o{.keep = 1, .device_bytes = set.device_bytes, .host_bytes = set.host_bytes, .prune = false};
    RlSpace space = default_rl_space(s, (*pricer)->train().framework());
    if (executes_) {
      o.plan_prices = plan_prices(s, (*pricer)->train().cost());
      keep_what_executes(space, s, (*pricer)->point().sync);
    }
    const RlSearch found = search_layouts(**pricer, space, o);
    return found.best.empty() ? std::nullopt : std::optional(found.best[0].price.iteration_seconds);
  }

  Scenario given_;
  std::int64_t most_;
  bool executes_;
  std::map<std::int64_t, std::optional<double>> best_seconds_;  // by GPUs
};

}  // namespace

TEST_CASE("the smallest cluster is the first of all counts, powers of two or not") {
  const struct {
    const char *model, *train, *rollout;
    double memory_gib;
    std::int64_t most;
  } cases[] = {
      {"qwen2.5-0.5b", "engine: fsdp2, layout: {dp: 2}, micro_batch_tokens: 256", "layout: {dp: 2}", 3.0, 3},
      {"qwen2.5-0.5b", "engine: fsdp2, layout: {dp: 2}, micro_batch_tokens: 256", "layout: {dp: 2}", 4.0, 3},
      {"qwen2.5-1.5b", "engine: megatron, layout: {dp: 2}, micro_batch_tokens: 256", "engine: sglang, layout: {dp: 2}",
       8.0, 3},
      {"qwen2.5-1.5b", "engine: megatron, layout: {dp: 2}, micro_batch_tokens: 256", "engine: sglang, layout: {dp: 2}",
       6.5, 7},
      {"qwen2.5-1.5b", "engine: megatron, layout: {dp: 2}, micro_batch_tokens: 256", "engine: sglang, layout: {dp: 2}",
       4.0, 4},
      {"qwen2.5-1.5b", "engine: zero2, layout: {dp: 2}, micro_batch_tokens: 256", "engine: vllm, layout: {dp: 2}", 10.0,
       4},
      {"qwen2.5-1.5b", "engine: fsdp2, layout: {dp: 2}, micro_batch_tokens: 256", "engine: sglang, layout: {dp: 2}",
       7.0, 5},
  };
  std::set<std::int64_t> answers;
  int faster = 0;
  for (const auto& c : cases) {
    INFO(c.model << " " << c.train << " " << c.memory_gib);
    const Scenario s =
        scenario_of(c.model, 2, c.train, c.rollout, {fmt::format("cluster.device_memory_gib={}", c.memory_gib)});
    const auto found = smallest_cluster(s, catalog_root(), {.keep = 1}, c.most);
    REQUIRE(found.has_value());
    CHECK(found->exact);
    CHECK(found->most_nodes == c.most);
    CHECK(found->executes == why_not_lowered(s).empty());
    EveryCluster brute(s, c.most, found->executes);
    const Fit expected = brute.first();
    CHECK(Fit{found->nodes, found->gpus} == expected);
    answers.insert(expected.gpus);
    if (expected.gpus > 0) {  // faster than there, and faster than anywhere
      const double there = found->search.best.at(0).price.iteration_seconds;
      for (const double within : {there, 0.6 * there, 1e-9}) {
        const auto fast = smallest_cluster(s, catalog_root(), {.keep = 1}, c.most, within);
        REQUIRE(fast.has_value());
        CHECK(fast->executes == found->executes);
        CHECK(Fit{fast->nodes, fast->gpus} == brute.first(within));
        CHECK((fast->gpus == 0) == (fast->fastest_gpus > 0));
        CHECK((within < there || fast->gpus == found->gpus));
        faster += fast->gpus > found->gpus;
      }
    }
    if (expected.gpus == 0) CHECK_FALSE(found->search.reason.empty());
    if (found->executes && found->priced_gpus > 0) {
      CHECK(Fit{(found->priced_gpus + 1) / 2, found->priced_gpus} == EveryCluster(s, c.most, false).first());
      CHECK((found->gpus == 0 || found->priced_gpus < found->gpus));
    }
  }
  CHECK(faster >= 2);
  // No power of two, and none at all: what doubling the nodes would have missed.
  CHECK((answers.contains(6) && answers.contains(10) && answers.contains(0)));
}

TEST_CASE("smaller clusters take the scenario's training with degrees that fit them") {
  // Experts over more ranks than a stage has left (4 of 2 x 4 GPUs, on 4 and on 2), or over some that do not divide
  // them (2 of 3 on 6 GPUs); stages with an own split and schedule that are given up (an odd number of GPUs).
  const struct {
    std::int64_t per_node, dp, ep, gpus;
    double memory_gib;
  } cases[] = {{4, 4, 4, 4, 16.0}, {6, 6, 2, 6, 14.0}};
  for (const auto& c : cases) {
    const auto smallest = [&](std::int64_t ep) {
      const Scenario s =
          scenario_of("{base: qwen3-30b-a3b, num_hidden_layers: 4}", c.per_node,
                      fmt::format("engine: megatron, layout: {{dp: {}, pp: 2, ep: {}}}, pipeline_split: [1, 3], "
                                  "pipeline_schedule: zero-bubble, micro_batch_tokens: 256",
                                  c.dp, ep),
                      fmt::format("engine: sglang, layout: {{tp: 4, dp: {}}}", c.per_node / 2),
                      {"cluster.nodes=2", fmt::format("cluster.device_memory_gib={}", c.memory_gib)});
      const auto found = smallest_cluster(s, catalog_root(), {.keep = 1}, 2, 60.0);
      if (!found) FAIL(render(found.error()));
      return *found;
    };
    INFO(c.per_node << " GPUs a node, ep " << c.ep);
    // Which layouts there are on a cluster is no matter of the scenario's own.
    const SmallestCluster spread = smallest(c.ep), whole = smallest(1);
    CHECK(spread.gpus == c.gpus);
    CHECK(whole.gpus == c.gpus);
    REQUIRE((!spread.search.best.empty() && !whole.search.best.empty()));
    CHECK(spread.search.best[0].price.iteration_seconds == whole.search.best[0].price.iteration_seconds);
  }
}

}  // namespace hotbunk
