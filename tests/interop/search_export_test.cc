// What the search proposes is what the system's launch says.
#include <fmt/format.h>

#include "interop/export.h"
#include "planner/answers/choices.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/interop/launches.h"

namespace hotbunk {

TEST_CASE("the best layouts of a system export whole: it has a key for all that was chosen") {
  for (const auto& [profile, engine, rollout, system] : {std::tuple{"verl-fsdp", "fsdp2", "vllm", "verl"},
                                                         {"verl-megatron", "megatron", "vllm", "verl"},
                                                         {"slime-megatron", "megatron", "sglang", "slime"},
                                                         {"slime-fsdp", "fsdp2", "sglang", "slime"},
                                                         {"nemo-megatron", "megatron", "vllm", "nemo-rl"}}) {
    INFO(profile);
    const auto scenario = load_scenario_text(
        fmt::format(
            "model: qwen2.5-7b\nprofile: {}\ncluster: {{gpu: h100-sxm-80gb}}\n"
            "train: {{engine: {}, layout: {{dp: 8}}, micro_batch_tokens: 20480, recompute: full}}\n"
            "rollout: {{engine: {}, layout: {{tp: 1, dp: 8}}, memory_fraction: 0.6}}\n"
            "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 2048, max: 8192}}}}\n",
            profile, engine, rollout),
        "chosen.yaml");
    REQUIRE(scenario.has_value());
    const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
    REQUIRE(pricer.has_value());
    const auto found = choose(**pricer, {.top = 5, .budget = 100'000});
    REQUIRE(found.has_value());
    REQUIRE_FALSE(found->rows.empty());
    const LaunchTable table = table_of(system);
    for (const ChoiceRow& row : found->rows)
      for (const std::string& unsaid : export_launch(table, with_point(*scenario, row.point)).unsaid) {
        INFO(unsaid);
        for (const char* key :
             {"train.layout.tp", "train.layout.cp", "train.layout.ulysses", "train.layout.pp", "train.layout.fsdp",
              "train.layout.shard_over", "rollout.layout.tp", "rollout.layout.pp", "rollout.layout.cp",
              "rollout.layout.order", "sync.mode", "transition", "train.recompute", "rollout.memory_fraction"})
          CHECK_FALSE(unsaid.starts_with(std::string(key) + ":"));
      }
  }
}

}  // namespace hotbunk
