// `plan` and `sweep` from the outside: JSON where JSON is asked for, and words that are none.
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/file.h"
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

TEST_CASE("compare of two saved plans says what the second does otherwise, line by line") {
  const fs::path file = scenario("compared", 2, 2);
  const auto saved = [&](const char* name, const std::string& set) {
    const fs::path out = work_folder() / name;
    REQUIRE(hotbunk_command(fmt::format("plan {} --out {}{}", file.string(), out.string(), set)).code == 0);
    return out.string();
  };
  const std::string first = saved("first.plan.json", ""), again = saved("again.plan.json", ""),
                    other = saved("other.plan.json", " --set train.recompute=full --set optimizer.lr=0.5");
  const Result2 same = hotbunk_command(fmt::format("compare {} {}", first, again));
  INFO(same.err);
  CHECK(same.code == 0);
  CHECK(same.out.find("Both are plan ") == 0);
  const Result2 differ = hotbunk_command(fmt::format("compare {} {}", first, other));
  INFO(differ.out);
  CHECK(differ.code == 1);
  for (const char* line : {"train.recompute: first none, second full\n", "optimizer.lr: first ",
                           "\n- program 0: ", "\n+ program 0: ", "\n~ program 0: section transient: "})
    CHECK_THAT(differ.out, Catch::Contains(line));
  CHECK_THAT(differ.err, Catch::Contains("run SCENARIO --plan " + other));
  // Beside the same plan, another learning rate alone is a difference too.
  const Result2 rate =
      hotbunk_command(fmt::format("compare --json {} {}", first, saved("rate.plan.json", " --set optimizer.lr=0.5")));
  CHECK(rate.code == 1);
  const Json doc = json_from<Json>(rate.out);
  CHECK(doc["schema"] == "hotbunk.plan-difference/1");
  CHECK(doc["equal"] == false);
  CHECK(doc["plans"][0] == doc["plans"][1]);
  CHECK(doc["differences"].size() == 1);
  const fs::path torn = work_folder() / "torn.plan.json";
  std::ofstream(torn) << "{";
  const Result2 timed = hotbunk_command(fmt::format("compare {} {} --max-error 0.1", first, other));
  CHECK(timed.code == 2);
  CHECK(timed.err.find("E144") != std::string::npos);
  const Result2 alone = hotbunk_command(fmt::format("compare {}", first));
  CHECK(alone.code == 2);
  CHECK(alone.err.find("two saved plans") != std::string::npos);
  const Result2 broken = hotbunk_command(fmt::format("compare {} {}", first, torn.string()));
  CHECK(broken.code == 2);
  CHECK_THAT(broken.err, Catch::Contains("error[E501]"));
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

namespace {

/// What the program writes to a terminal.
std::string on_terminal(const std::vector<std::string>& arguments, const char* no_colour = nullptr) {
  int screen = -1;
  const pid_t child = ::forkpty(&screen, nullptr, nullptr, nullptr);
  if (child == 0) {
    if (no_colour != nullptr) ::setenv("NO_COLOR", no_colour, 1);
    else ::unsetenv("NO_COLOR");
    std::vector<char*> argv = {const_cast<char*>("hotbunk")};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    ::execv(program_file, argv.data());
    ::_exit(9);
  }
  std::string said;
  char buffer[4096];
  for (ssize_t n; (n = ::read(screen, buffer, sizeof buffer)) > 0;) said.append(buffer, static_cast<std::size_t>(n));
  ::close(screen);
  ::waitpid(child, nullptr, 0);
  return said;
}

fs::path priced_scenario(const std::string& more = "") {
  const fs::path file = work_folder() / "headline.yaml";
  std::ofstream(file) << "name: head\nmodel: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, nodes: 1, "
                         "gpus_per_node: 8}\n"
                         "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 20480, recompute: full}\n"
                         "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.6}\n"
                         "algorithm: {prompts: 64, samples_per_prompt: 4}\n"
                         "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n"
                      << more;
  return file;
}

}  // namespace

TEST_CASE("plan answers in its first ten lines: verdict, seconds with their errors, the best layout, its shorthand") {
  for (const fs::path& file : {priced_scenario(), scenario("head", 2, 2)}) {
    INFO(file);
    const Result2 r = hotbunk_command(fmt::format("plan {}", file.string()));
    REQUIRE(r.code == 0);
    const std::vector<std::string> lines = lines_of(r.out);
    const auto end = std::ranges::find(lines, "");
    REQUIRE(end - lines.begin() <= 10);
    const std::vector<std::string> head(lines.begin(), end);
    const auto has = [&](const std::string& start) {
      return std::ranges::any_of(head, [&](const std::string& l) { return l.starts_with(start); });
    };
    CHECK(has("Verdict: fits; a GPU holds "));
    CHECK(has("Iteration: "));
    CHECK((has("Best by seconds: ") || has("Yours is the best of ")));
    CHECK(has("dp data; "));
    for (const std::string& line : head) CHECK((line.size() <= 170 || line.starts_with("  take it:")));
    CHECK(r.out.find('\033') == std::string::npos);
    // The rest is there where it is asked for.
    const char* const details[] = {"Where the seconds go", "live bytes at each phase's peak"};
    for (const char* d : details) CHECK(r.out.find(d) == std::string::npos);
    const Result2 more = hotbunk_command(fmt::format("plan {} --details", file.string()));
    CHECK(std::ranges::any_of(details, [&](const char* d) { return more.out.find(d) != std::string::npos; }));
    CHECK(more.out.starts_with(r.out.substr(0, r.out.find("\n\n"))));
  }
}

TEST_CASE("the flags that plan names first select its best layout") {
  const fs::path file = priced_scenario();
  const Result2 r = hotbunk_command(fmt::format("plan {}", file.string()));
  const std::string mark = "  take it:";
  const auto at = r.out.find(mark);
  REQUIRE(at != std::string::npos);
  const std::string flags = r.out.substr(at + mark.size(), r.out.find('\n', at) - at - mark.size());
  const Result2 taken = hotbunk_command(fmt::format("plan {} {}", file.string(), flags));
  INFO(flags);
  REQUIRE(taken.code == 0);
  CHECK_THAT(taken.out, Catch::Contains("Yours is the best of "));
}

TEST_CASE("plan and explain write their answer as a page; plan ranks both trainers of a system") {
  const fs::path file = priced_scenario(), page = work_folder() / "page.html";
  for (const char* command : {"plan", "explain"}) {
    fs::remove(page);
    const Result2 r = hotbunk_command(fmt::format("{} {} --html {}", command, file.string(), page.string()));
    INFO(r.err);
    REQUIRE(r.code == 0);
    REQUIRE(fs::exists(page));
    const auto html = read_file(page);
    REQUIRE(html);
    CHECK_THAT(*html, Catch::Contains("\"pareto\"") && Catch::Contains("\"sensitivity\""));
  }
  CHECK_THAT(hotbunk_command(fmt::format("plan {}", file.string())).out,
             Catch::Contains("Under verl-fsdp, as the scenario says, and under verl-megatron"));
}

TEST_CASE("solve takes its key and its scenario in either order, and prints whole numbers") {
  const std::string file = priced_scenario().string(), key = "workload.response_tokens.max";
  const Result2 one = hotbunk_command(fmt::format("solve {} {}", key, file)),
                other = hotbunk_command(fmt::format("solve {} {}", file, key));
  CHECK(one.code == 0);
  CHECK(one.out == other.out);
  CHECK_THAT(one.out, Catch::StartsWith(key + " can be ") && !Catch::Contains("e+0"));
  for (const std::string& order : {fmt::format("solve {} nokey", file), fmt::format("solve nokey {}", file)}) {
    const Result2 wrong = hotbunk_command(order);
    CHECK(wrong.code == 2);
    CHECK_THAT(wrong.err, Catch::Contains("E261") && Catch::Contains("nokey is no key of one number"));
  }
}

TEST_CASE("plan is in colour on a terminal alone, and not where NO_COLOR is set") {
  const std::string file = priced_scenario().string();
  CHECK_THAT(on_terminal({"plan", file}), Catch::Contains("Verdict: \033[1;32mfits\033[0m"));
  CHECK_THAT(on_terminal({"plan", file, "--set", "cluster.device_memory_mib=20000"}), Catch::Contains("\033[1;31mno"));
  CHECK(on_terminal({"plan", file}, "1").find('\033') == std::string::npos);
  CHECK_THAT(on_terminal({"plan", file}, ""), Catch::Contains("\033[1;32m"));  // empty is not set (no-color.org)
}

TEST_CASE("lint's warnings stand beside the plan of what is lowered, too") {
  // 3 samples of an optimizer step over two data ranks.
  const std::string asked = fmt::format("plan {} --set algorithm.prompts=3 --set algorithm.samples_per_prompt=1",
                                        scenario("uneven", 2, 1).string());
  const Result2 text = hotbunk_command(asked);
  INFO(text.err);
  CHECK_THAT(text.err, Catch::Contains("note: L02 warning: 3 samples of an optimizer step over 2 data ranks"));
  CHECK_THAT(text.out, Catch::Contains("lint: L02 warning"));
  const Json doc = json_from<Json>(hotbunk_command(asked + " --json").out);
  REQUIRE(doc["lowered"] == true);
  CHECK(doc["findings"].size() == 1);
  CHECK(doc["findings"][0]["code"] == "L02");
}

TEST_CASE("errors of plan are one JSON document under --json") {
  const Result2 r = hotbunk_command("plan /nowhere.yaml --json");
  CHECK(r.code == 2);
  CHECK(json_from<Json>(r.out)["schema"] == "hotbunk.error/1");
}
