// `plan` and `sweep` from the outside: JSON where JSON is asked for, and words that are none.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

TEST_CASE("plan --resolved --json is one document, and its scenario loads back to itself") {
  const fs::path file = scenario("resolved", 2, 2);
  const Result2 first = hotbunk_command(fmt::format("plan {} --resolved --json", file.string()));
  REQUIRE(first.code == 0);
  const Json doc = json_from<Json>(first.out);
  CHECK(doc["schema"] == "hotbunk.scenario/1");
  CHECK(doc["scenario"]["train"]["layout"]["dp"] == 2);
  CHECK(doc["scenario"]["optimizer"]["name"] == "adamw");
  CHECK(doc["scenario"]["cluster"]["gpu"]["memory_gb_per_s"].contains("source"));
  const fs::path again = work_folder() / "again.yaml";
  std::ofstream(again) << json_text(doc["scenario"], 1);
  const Result2 second = hotbunk_command(fmt::format("plan {} --resolved --json", again.string()));
  INFO(second.err);
  REQUIRE(second.code == 0);
  CHECK(json_from<Json>(second.out) == doc);
  const auto yaml = [](const fs::path& p) {
    return hotbunk_command(fmt::format("plan {} --resolved", p.string())).out;
  };
  CHECK(yaml(again) == yaml(file));
}

TEST_CASE("plan --print: JSON, one phase, and no phase of that name") {
  const fs::path file = scenario("print", 2, 2);
  const Result2 whole = hotbunk_command(fmt::format("plan {} --print --json", file.string()));
  REQUIRE(whole.code == 0);
  const Json plan = json_from<Json>(whole.out);
  REQUIRE(plan["programs"].size() >= 1);
  const Result2 one = hotbunk_command(fmt::format("plan {} --print --json --phase sync", file.string()));
  REQUIRE(one.code == 0);
  const Json sync = json_from<Json>(one.out);
  for (std::size_t i = 0; i < plan["phases"].size(); ++i) {
    const bool chosen = plan["phases"][i]["name"] == "sync";
    CHECK(sync["programs"][0]["phases"][i] == (chosen ? plan["programs"][0]["phases"][i] : Json::array()));
  }
  const Result2 none = hotbunk_command(fmt::format("plan {} --print --phase snyc", file.string()));
  CHECK(none.code == 2);
  CHECK(none.out.empty());
  CHECK_THAT(none.err, Catch::Contains("error[E129]: the plan has no phase 'snyc'") &&
                           Catch::Contains("its phases: load, ") && Catch::Contains("did you mean sync?"));
}

TEST_CASE("what is no UTF-8 is told before anything is planned") {
  const fs::path file = scenario("bytes", 2, 2);
  for (const char* json : {"", " --json"}) {
    const Result2 set =
        hotbunk_command(fmt::format("plan {}{} --set \"name=$(printf 'a\\377')\"", file.string(), json));
    CHECK(set.code == 2);
    CHECK_THAT(set.err, Catch::Contains("error[E201]: the text is no UTF-8") && Catch::Contains("--set name"));
    CHECK(set.out.empty() == (*json == 0));  // under --json the error is the document
  }
  const fs::path bad = scenario("bad", 2, 2, "# caf\xe9");
  const Result2 read = hotbunk_command(fmt::format("plan {} --json", bad.string()));
  CHECK(read.code == 2);
  CHECK_THAT(read.err, Catch::Contains("error[E201]: the text is no UTF-8"));
  CHECK(hotbunk_command(fmt::format("plan {} --json", scenario("good", 2, 2, "# caf\xc3\xa9").string())).code == 0);
}

TEST_CASE("sweep: an unknown key or word is bad input, and no file is written") {
  const fs::path file = scenario("grid", 2, 2), out = work_folder() / "grid.csv";
  const auto run = [&](const std::string& rest) {
    return hotbunk_command(fmt::format("sweep {} --out {} {}", file.string(), out.string(), rest));
  };
  const Result2 key = run("--vary train.layout.nope=1,2");
  CHECK(key.code == 2);
  CHECK_THAT(key.err, Catch::Contains("error[E202]: unknown key train.layout.nope"));
  CHECK(run("--vary seed=1,2 --set trian.prefetch=0").code == 2);
  CHECK(run("--vary train.recompute=full,fulll").code == 2);
  CHECK_FALSE(fs::exists(out));
  // What does not divide is a line of the table.
  CHECK(run("--vary train.layout.dp=1,2").code == 0);
  CHECK_THAT(text_of(out), Catch::Contains("1,invalid"));
}

TEST_CASE("money without a price names the key and how to give it, in one line") {
  const Result2 plan = hotbunk_command(fmt::format("plan {} --objective money", scenario("money", 2, 2).string()));
  CHECK(plan.code == 2);
  CHECK_THAT(plan.err, Catch::Contains("= help: prices are no fact of a GPU: --set cluster.gpu.price_per_hour=PRICE"));
  const Result2 given = hotbunk_command(
      fmt::format("plan {} --objective money --set cluster.gpu.price_per_hour=2.5", scenario("priced", 2, 2).string()));
  CHECK(given.code == 0);
}

TEST_CASE("plan of what is priced and lint agree: warnings and errors stand beside the answer, but for the fit") {
  const fs::path file = work_folder() / "priced.yaml";
  std::ofstream(file)
      << "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n"
         "train: {engine: fsdp2, layout: {dp: 16}, micro_batch_tokens: 20480, recompute: full}\n"
         "rollout: {engine: vllm, layout: {tp: 2, dp: 8}, memory_fraction: 0.6}\n"
         "algorithm: {prompts: 255, samples_per_prompt: 1}\n"
         "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n";
  const Json found = json_from<Json>(hotbunk_command(fmt::format("lint {} --json", file.string())).out)["findings"];
  const Result2 text = hotbunk_command(fmt::format("plan {}", file.string()));
  const Json plan = json_from<Json>(hotbunk_command(fmt::format("plan {} --json", file.string())).out);
  Json expected = Json::array();
  for (const Json& f : found) {
    const bool beside = f["level"] != "note" && f["code"] != "L13";
    if (beside) expected.push_back(f);
    const std::string line = fmt::format("note: {} {}: ", f["code"].get<std::string>(), f["level"].get<std::string>());
    CHECK((text.err.find(line) != std::string::npos) == beside);
  }
  CHECK_FALSE(expected.empty());
  CHECK(plan["findings"] == expected);
}
