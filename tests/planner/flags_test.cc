// The --set flags of a search's points select exactly these points, whichever knob they turn.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "planner/answers/answers.h"
#include "planner/answers/choices.h"
#include "planner/search/search.h"
#include "planner/search/train_points.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/json.h"

namespace hotbunk {

TEST_CASE("the flags of any training point of a space select that point") {
  const char* const rest =
      "rollout: {engine: sglang, layout: {tp: 8, dp: 4}}\nalgorithm: {prompts: 64, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 39000}}\n";
  const struct {
    const char* text;
    std::size_t schedules, etps, on_host, longest_cp;  // values that the sample has
  } cases[] = {{"model: qwen3-30b-a3b\ncluster: {gpu: h200-sxm-141gb, nodes: 4}\nprofile: hotbunk\n"
                "train: {engine: megatron, layout: {dp: 4, tp: 4, pp: 2, ep: 4}, micro_batch_tokens: 65536}\n",
                3, 4, 1, 32},
               {"model: qwen3-32b\ncluster: {gpu: h200-sxm-141gb, nodes: 4}\nprofile: torchtitan\n"
                "train: {engine: fsdp2, layout: {dp: 32}, micro_batch_tokens: 65536, recompute: selective, "
                "recompute_modules: [core_attn, mlp], load: rank0}\n",
                1, 1, 2, 32}};
  for (const auto& c : cases) {
    const std::string text = std::string(c.text) + rest;
    const auto s = load_scenario_text(text, "t.yaml");
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const TrainSpace space = default_rl_space(*s, (*pricer)->train().framework()).train;
    std::set<PipelineSchedule> schedules;
    std::set<std::int64_t> etps, cps, groups;
    std::set<bool> on_host;
    std::int64_t seen = 0, tried = 0;
    for (const LayerKey& key : layer_keys(space))
      visit_points((*pricer)->train(), space, key, [&](const TrainPoint& t, const auto&) {
        if (seen++ % 47 != 0) return;
        RlPoint p = (*pricer)->point();
        p.train = t;
        const std::vector<std::string> flags = flags_of(*s, p);
        INFO(describe(t) << "\n" << json_text(nlohmann::json(flags)));
        const auto again = load_scenario_text(text, "t.yaml", flags);
        if (!again) FAIL(render(again.error()));
        CHECK(rl_point_of(*again).train == t);
        schedules.insert(t.schedule), etps.insert(t.etp), cps.insert(t.cp), groups.insert(t.fsdp);
        on_host.insert(t.optimizer_on_host);
        ++tried;
      });
    CHECK(tried > 100);
    CHECK(schedules.size() == c.schedules);
    CHECK(etps.size() == c.etps);
    CHECK(on_host.size() == c.on_host);
    CHECK(*cps.rbegin() == static_cast<std::int64_t>(c.longest_cp));
    CHECK(groups.size() > 1);
  }
}

TEST_CASE("one row stands for a layout however its engines split experts") {
  RlPoint whole, cut;
  whole.rollout.tp = cut.rollout.tp = 8, whole.rollout.ep = 8;
  CHECK(same_layout(whole, cut));
  cut.rollout.attention_dp = 8;
  CHECK_FALSE(same_layout(whole, cut));
}

TEST_CASE("a framework's rows cut sequences only as it can, unless the scenario does otherwise") {
  const auto cuts = [](const std::string& profile, const std::string& layout) {
    const auto s = load_scenario_text("model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb}\nprofile: " + profile +
                                          "\ntrain: {engine: fsdp2, layout: " + layout +
                                          ", micro_batch_tokens: 16384}\nrollout: {engine: sglang, layout: {dp: 8}}\n",
                                      "t.yaml");
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    const TrainSpace space = default_rl_space(*s, (*pricer)->train().framework()).train;
    return std::pair(space.cp.size() > 1, space.ulysses.size() > 1);
  };
  CHECK(cuts("hotbunk", "{dp: 8}") == std::pair(true, true));
  CHECK(cuts("verl-fsdp", "{dp: 8}") == std::pair(false, true));
  CHECK(cuts("verl-fsdp", "{dp: 4, cp: 2}") == std::pair(true, true));
  CHECK(cuts("slime-fsdp", "{dp: 8}") == std::pair(true, false));
  CHECK(cuts("torchtitan", "{dp: 8}") == std::pair(true, false));
  CHECK(cuts("nemo-fsdp", "{dp: 8}") == std::pair(true, false));
}

}  // namespace hotbunk
