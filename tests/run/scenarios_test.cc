// The small scenarios that are shipped, one for each kind of layout, as a user tries them.
#include <map>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;

TEST_CASE("each small scenario is planned and run, and what ran is what was simulated") {
  int tried = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(source_folder) / "scenarios")) {
    const std::string name = entry.path().filename();
    if (!name.ends_with("-cpu.yaml") || name.starts_with("qwen")) continue;  // what is no toy takes minutes
    CAPTURE(name);
    must_run(fmt::format("layout {}", entry.path().string()));
    must_run(fmt::format("plan {}", entry.path().string()));
    const fs::path out = work_folder() / (name + ".out");
    const Result2 run =
        hotbunk_command(fmt::format("run {} --set steps=3 --check --out {}", entry.path().string(), out.string()));
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(run.out.find("are the same in simulated and measured") != std::string::npos);
    ++tried;
  }
  CHECK(tried >= 2);
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
