// The small scenarios that are shipped, one for each kind of layout, as a user tries them.
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json.h"
#include "spec/family.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("each small scenario is planned and run, and what ran is what was simulated") {
  std::set<const FamilySpec*> tried;
  for (const auto& entry : fs::directory_iterator(fs::path(source_folder) / "scenarios")) {
    const std::string name = entry.path().filename();
    if (!name.ends_with("-cpu.yaml") || name.starts_with("qwen")) continue;  // what is no toy takes minutes
    CAPTURE(name);
    must_run(fmt::format("layout {}", entry.path().string()));
    must_run(fmt::format("plan {}", entry.path().string()));
    const fs::path out = work_folder() / (name + ".out");
    const Result2 run =
        hotbunk_command(fmt::format("run {} --set steps=2 --check --out {}", entry.path().string(), out.string()));
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(run.out.find("are the same in simulated and measured") != std::string::npos);
    tried.insert(load_scenario(entry.path().string()).value().model.family);
  }
  // Of every family that has goldens: those are executed.
  for (const auto& entry : fs::directory_iterator(fs::path(source_folder) / "tests/golden")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    const ModelSpec golden = load_model(entry.path()).value();
    INFO(family_of(golden).model_type << ": no scenario of it");
    CHECK(tried.contains(golden.family));
  }
}

TEST_CASE("70B over stages, tensor-parallel and data ranks is simulated as it would run") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/llama-3.1-70b-zero1.yaml").string();
  const Result2 simulated = hotbunk_command("simulate --json " + scenario);
  INFO(simulated.err);
  REQUIRE(simulated.code == 0);
  const auto document = json_from<nlohmann::json>(simulated.out);
  CHECK(document.at("fits") == true);
  std::map<std::int64_t, std::int64_t> kept;  // most activations of the first rank of each stage
  for (const auto& rank : document.at("memory").at("by_rank"))
    if (const auto number = rank.at("rank").get<std::int64_t>(); number % 16 == 0)
      kept[number / 16] = rank.at("category_peaks").at("activations").get<std::int64_t>();
  REQUIRE(kept.size() == 4);
  for (std::int64_t stage = 0; stage < 3; ++stage) CHECK(kept[stage] > kept[stage + 1]);  // 1F1B: 4 - p micro-batches
}

TEST_CASE("DeepSeek-V3 on 1,024 GPUs is simulated as it would run, with the memory of each stage") {
  const std::string scenario = (fs::path(source_folder) / "scenarios/deepseek-v3-1024.yaml").string();
  const Result2 layout = hotbunk_command("layout " + scenario);
  CHECK(layout.code == 0);
  CHECK_THAT(layout.out, Catch::Contains("stage 15"));
  const Result2 simulated = hotbunk_command("simulate --json " + scenario);
  INFO(simulated.err);
  REQUIRE(simulated.code == 0);
  const auto document = json_from<nlohmann::json>(simulated.out);
  CHECK(document.at("fits") == true);
  // Every rank writes its own part of the last checkpoint: nothing moves for it, and it needs no memory.
  CHECK(document.at("memory").at("peak_phase") == "train");
  for (const auto& row : document.at("traffic")) CHECK(row.at("phase") != "export");
  std::map<std::int64_t, std::int64_t> kept;  // most activations of the first rank of each stage
  for (const auto& rank : document.at("memory").at("by_rank"))
    if (const auto number = rank.at("rank").get<std::int64_t>(); number % 64 == 0)
      kept[number / 64] = rank.at("category_peaks").at("activations").get<std::int64_t>();
  REQUIRE(kept.size() == 16);
  // 1F1B: stage p keeps the inputs of 16 - p micro-batches, 4096 / 8 rows of 7168 in bf16 for each of its 4 layers.
  for (std::int64_t stage = 0; stage + 2 < 16; ++stage)
    CHECK(kept[stage] - kept[stage + 1] == std::int64_t{4} * 4096 / 8 * 7168 * 2);
  // Ranks that are alike are played by one: whoever has other experts alone is.
  CHECK(document.at("memory").at("by_rank").size() < 256);
}

TEST_CASE("layout names the groups of each rank, in training and in its engine") {
  const auto rank = [](const std::string& scenario, int number) {
    const std::string path = (fs::path(source_folder) / "scenarios" / scenario).string();
    const Result2 said = hotbunk_command(fmt::format("layout {} --rank {} --json", path, number));
    INFO(said.err);
    REQUIRE(said.code == 0);
    return json_from<nlohmann::json>(said.out).at("ranks").at(0);
  };
  using nlohmann::json;
  // 4 ranks of tp 2: each has 2 of 8 experts; an engine of 2 stages with 2 layers between them, 2 ranks each.
  const json mesh = rank("expert-mesh-cpu.yaml", 3);
  CHECK(mesh.at("training").at("groups") ==
        json({{"tp", {2, 3}}, {"dp", {1, 3}}, {"ep", {0, 1, 2, 3}}, {"shard", {1, 3}}}));
  CHECK(mesh.at("engine").at("groups") == json({{"tp", {2, 3}}, {"pp", {1, 3}}, {"ep", {2, 3}}}));
  CHECK(mesh.at("engine").at("layers") == json({{1, 2}}));
  CHECK(mesh.at("engine").at("experts") == json({4, 8}));
  // Pairs of neighbours have half of each of their experts, every second rank other experts.
  const json columns = rank("expert-columns-cpu.yaml", 3);
  CHECK(columns.at("training").at("groups") == json({{"tp", {0, 1, 2, 3}}, {"ep", {1, 3}}, {"etp", {2, 3}}}));
  CHECK(columns.at("training").at("experts") == json({4, 8}));
  // Pairs of data ranks share each expert; an engine's group of one rank on the second of two stages.
  const json sharers = rank("expert-sharers-cpu.yaml", 3);
  CHECK(sharers.at("training").at("groups") ==
        json({{"dp", {0, 1, 2, 3}}, {"ep", {1, 3}}, {"etp", {2, 3}}, {"shard", {0, 1, 2, 3}}}));
  CHECK(sharers.at("training").at("experts") == json({4, 8}));
  CHECK(sharers.at("engine").at("layers") == json({{1, 2}}));
  CHECK(sharers.at("engine").at("attention_dp") == 1);
  // HSDP: 2 neighbours share the shards, rank 1 has the same ones. Nobody spreads experts.
  const json hybrid = rank("deepseek-v2-cpu.yaml", 3);
  CHECK(hybrid.at("training").at("groups") ==
        json({{"dp", {0, 1, 2, 3}}, {"edp", {0, 1, 2, 3}}, {"shard", {2, 3}}, {"replicate", {1, 3}}}));
  CHECK(hybrid.at("training").at("shard") == json({1, 2}));
  CHECK(hybrid.at("engine").at("groups") == json({{"tp", {2, 3}}}));
  CHECK(hybrid.at("engine").at("experts") == json({0, 8}));
}
