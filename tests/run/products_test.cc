// Which paths products of bf16 take is a run's own fact: fixed by a variable, measured, or a checkpoint's; it stands in
// run.json, the run_hash and checkpoints, and ranks share it.
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "base/printable.h"
#include "tests/json.h"
#include "tests/run/launched.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

constexpr const char* variable = "HOTBUNK_BF16_PRODUCTS";
[[maybe_unused]] const int unset = ::unsetenv(variable);  // what somebody has set to test by is no case's
// No machine's rule, and every machine can do it.
constexpr const char* elsewhere = "widened to fp32; some rows: oneDNN in fp32; many rows: oneDNN in fp32";

struct Ran {
  std::string products, sets, hash, learned, err;
};

/// Sums of 32 products of bf16 are nearly exact on every path; of 256 and 512 they are not. And a step is large enough
/// that a rounding of the gradient reaches the weights.
std::string in_bf16(const std::string& name, int ranks, int steps = 1) {
  return fmt::format(
      "{} --threads 1 --set train.precision.params=bf16 --set rollout.dtype=bf16 --set model.hidden_size=256 "
      "--set model.intermediate_size=512 --set cluster.device_memory_mib=64",
      scenario(name, ranks, 1, fmt::format("steps: {}\noptimizer: {{lr: 2.0e-2}}", steps)).string());
}

Ran run(const std::string& arguments, const std::string& name) {
  const fs::path out = work_folder() / name;
  const Result2 r = hotbunk_command(fmt::format("run {} --out {}", arguments, out.string()));
  INFO(r.err);
  REQUIRE(r.code == 0);
  const Json walked = json_from<Json>(text_of(out / "run.json"));
  const Json state = json_from<Json>(text_of(out / "checkpoints/final/state.json"));
  CHECK(state["bf16_products"] == walked["bf16_products"]);
  std::string learned;  // masters and moments in fp32 tell apart what weights in bf16 do not
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    learned += hash_text(text_of(out / "checkpoints/final" / file));
    REQUIRE(fs::exists(out / "checkpoints/final" / file));
  }
  return {walked["bf16_products"], walked["instruction_sets"], walked["run_hash"], learned, r.err};
}

Ran run_with(const char* products, const std::string& arguments, const std::string& name) {
  const EnvironmentVariable set(variable, products);
  return run(arguments, name);
}

}  // namespace

TEST_CASE("a variable that a case sets is afterwards what it was") {
  const EnvironmentVariable outer(variable, "rule");
  { const EnvironmentVariable inner(variable, elsewhere); }
  CHECK(std::string(std::getenv(variable)) == "rule");
}

TEST_CASE("a choice that the variable names is the run's, its hash's and its bits'") {
  const std::string scenario_of_run = in_bf16("fixed", 1);
  const Ran rule = run_with("rule", scenario_of_run, "fixed_rule");
  const Ran other = run_with(elsewhere, scenario_of_run, "fixed_other");
  CHECK(other.products == elsewhere);
  CHECK(rule.products != elsewhere);
  CHECK(other.hash != rule.hash);
  CHECK(other.learned != rule.learned);
  CHECK_THAT(other.err, Catch::Contains(fmt::format("products of bf16: {}\n", elsewhere)));
  CHECK_THAT(rule.err, !Catch::Contains("products of bf16"));
  // Two ranks that the program starts have its choice, by whichever way it came to it.
  CHECK(run_with(elsewhere, in_bf16("fixed2", 2), "fixed_two").products == elsewhere);
  // A run in fp32 has no products of bf16: nothing of them is measured, chosen or said.
  const std::string fp32 = fmt::format("{} --threads 1", scenario("fixed_fp32", 1, 1, "steps: 1").string());
  const auto walked = [&](const char* products, const std::string& name) {
    const EnvironmentVariable set(variable, products);
    const fs::path out = work_folder() / name;
    must_run(fmt::format("run {} --out {}", fp32, out.string()));
    return json_from<Json>(text_of(out / "run.json"));
  };
  const Json fp32_rule = walked("rule", "fp32_rule"), fp32_other = walked(elsewhere, "fp32_other");
  CHECK(fp32_rule["bf16_products"] == rule.products);
  CHECK(fp32_other["run_hash"] == fp32_rule["run_hash"]);
}

TEST_CASE("the launcher measures before ranks are there, and hands its choice on") {
  const EnvironmentVariable set(variable, "measure");
  const fs::path said = work_folder() / "handed.err";
  Running launcher(
      fmt::format("run {} --set steps=100000 --out {}", in_bf16("handed", 2), (work_folder() / "handed").string()),
      said);
  REQUIRE(wait_for_text(said, "step 1/"));
  const std::vector<int> ranks = children_of(launcher.pid());
  REQUIRE(ranks.size() == 2);
  const auto handed = [](int pid) {
    const std::string all = text_of(fmt::format("/proc/{}/environ", pid)), name = fmt::format("{}=", variable);
    const auto at = all.find(name);
    REQUIRE(at != std::string::npos);
    return std::string(all.c_str() + at + name.size());
  };
  const std::string choice = handed(ranks[0]);
  CHECK(choice != "measure");
  CHECK(handed(ranks[1]) == choice);
  launcher.kill(SIGTERM);
  CHECK(launcher.wait() == 0);
  CHECK(json_from<Json>(text_of(work_folder() / "handed/run.json"))["bf16_products"] == choice);
}

TEST_CASE("a profile is calibrated with the products that a run of its scenario has") {
  const auto source = [](const char* products, const std::string& arguments) {
    const EnvironmentVariable set(variable, products);
    const fs::path out = work_folder() / "profile.yaml";
    must_run(fmt::format("calibrate {} --steps 2 --out {}", arguments, out.string()));
    const std::vector<std::string> lines = lines_of(text_of(out));
    const auto found =
        std::ranges::find_if(lines, [](const std::string& line) { return line.starts_with("source: "); });
    REQUIRE(found != lines.end());
    return *found;
  };
  const std::string in_fp32 = scenario("profile_fp32", 1, 1).string();
  for (const int ranks : {1, 2}) {
    const std::string of_calibration = fmt::format("{} --set train.precision.params=bf16 --set rollout.dtype=bf16",
                                                   scenario(fmt::format("profile{}", ranks), ranks, 1).string());
    CHECK_THAT(source(elsewhere, of_calibration), Catch::Contains(fmt::format("; products of bf16: {}", elsewhere)));
    CHECK_THAT(source("rule", of_calibration), !Catch::Contains("products of bf16"));
  }
  CHECK_THAT(source(elsewhere, in_fp32), !Catch::Contains("products of bf16"));
  const EnvironmentVariable set(variable, "abacus");
  CHECK_THAT(hotbunk_command("calibrate " + in_fp32).err, Catch::Contains("error[E709]"));
}

TEST_CASE("what was measured is a choice like any other, whatever OpenMP's number of threads") {
  const std::string scenario_of_run = in_bf16("measured", 1);
  const auto measured = [&](const char* threads, const std::string& name) {
    const EnvironmentVariable openmp("OMP_NUM_THREADS", threads);
    return run(scenario_of_run, name);
  };
  const Ran one = measured("1", "measured_one");
  const Ran again = run_with(one.products.c_str(), scenario_of_run, "measured_again");
  CHECK(again.hash == one.hash);
  CHECK(again.learned == one.learned);
  // Measured twice it may be two on a machine that others use: then the hashes say so.
  const Ran three = measured("3", "measured_three");
  CHECK((three.hash == one.hash) == (three.products == one.products));
  if (three.hash == one.hash) CHECK(three.learned == one.learned);
}

TEST_CASE("a run that goes on takes its checkpoint's choice, and measures where it cannot") {
  for (const int ranks : {1, 2}) {
    const std::string scenario_of_run = in_bf16(fmt::format("onward{}", ranks), ranks, 2);
    const Ran whole = run_with(elsewhere, scenario_of_run, fmt::format("onward_whole{}", ranks));
    const std::string first = fmt::format("onward_first{}", ranks);
    run_with(elsewhere, scenario_of_run + " --set steps=1", first);
    const auto resumed = [&](const std::string& name) {
      return run(fmt::format("--threads 1 --set steps=2 --resume {}", (work_folder() / first).string()), name);
    };
    const Ran same = resumed(fmt::format("onward_same{}", ranks));
    CHECK(same.products == elsewhere);
    CHECK(same.learned == whole.learned);
    CHECK_THAT(same.err, !Catch::Contains("E425"));
    const EnvironmentVariable set(variable, "rule");
    const Ran other = resumed(fmt::format("onward_other{}", ranks));
    CHECK(other.products != elsewhere);
    CHECK(other.learned != whole.learned);
    CHECK_THAT(other.err, Catch::Contains(fmt::format("warning[E425]: products are formed in another way there: those "
                                                      "of bf16 by {} there, {} here",
                                                      elsewhere, other.products)));
  }
  // Of a unit that this machine has not, and of a checkpoint whose words are none.
  const fs::path state = work_folder() / "onward_first1/checkpoints/final/state.json";
  fs::remove(state.parent_path() / "manifest.json");  // which knows the file's digest
  const std::string before = text_of(state);
  const std::string rule = run_with("rule", in_bf16("onward_rule", 1), "onward_rule").products;
  for (const std::string lacking : {rule == "AMX tiles" ? "AVX512_BF16" : "AMX tiles", "abacus"}) {
    Json changed = json_from<Json>(before);
    changed["bf16_products"] = lacking;
    std::ofstream(state) << changed.dump();
    const EnvironmentVariable unset(variable, "");
    const Ran on = run(fmt::format("--threads 1 --set steps=2 --resume {}", (work_folder() / "onward_first1").string()),
                       "onward_" + lacking.substr(0, 3));
    CHECK(on.products != lacking);
    CHECK_THAT(on.err, Catch::Contains(fmt::format("those of bf16 by {} there, {} here", lacking, on.products)));
  }
}

TEST_CASE("oneDNN's version is among the instruction sets; a checkpoint that does not know it is no other arithmetic") {
  const Ran first = run(in_bf16("versioned", 1), "versioned");
  const auto at = first.sets.find(", oneDNN ");
  REQUIRE(at != std::string::npos);
  CHECK(first.sets.find_first_of("0123456789", at) == at + 9);
  const fs::path state = work_folder() / "versioned/checkpoints/final/state.json";
  fs::remove(state.parent_path() / "manifest.json");  // which knows the file's digest
  const Json before = json_from<Json>(text_of(state));
  const auto resumed = [&](const std::string& sets, const std::string& name) {
    Json changed = before;
    changed["instruction_sets"] = sets;
    std::ofstream(state) << changed.dump();
    return run(fmt::format("--threads 1 --set steps=2 --resume {}", (work_folder() / "versioned").string()), name).err;
  };
  CHECK_THAT(resumed(first.sets.substr(0, at), "versioned_before"), !Catch::Contains("E425"));
  CHECK_THAT(resumed(first.sets.substr(0, at) + ", oneDNN 1.0.0", "versioned_other"),
             Catch::Contains("E425") && Catch::Contains("oneDNN 1.0.0 there"));
}

TEST_CASE("words that name no choice of this machine are refused, and doctor says what it would take") {
  for (const char* bad : {"fast", "Rule", "AMX tiles; few rows: AVX512_BF16", "\xff\x1b[31mx"}) {
    const EnvironmentVariable set(variable, bad);
    const fs::path out = work_folder() / "refused";
    const Result2 r = hotbunk_command(fmt::format("run {} --out {}", in_bf16("refused", 2), out.string()));
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains(
                          fmt::format("error[E709]: HOTBUNK_BF16_PRODUCTS = \"{}\" is no way", printable_line(bad))) &&
                          Catch::Contains("this machine's unit: ") &&
                          Catch::Contains("= help: set it to measure, rule") && !Catch::Contains("starting"));
    CHECK_FALSE(fs::exists(out));
    const Result2 doctor = hotbunk_command("doctor --json");
    CHECK(doctor.code == 1);
    CHECK_THAT(json_text(json_from<Json>(doctor.out)["checks"]),
               Catch::Contains("is no way to form products of bf16 here"));
  }
  const EnvironmentVariable set(variable, elsewhere);
  const Json said = json_from<Json>(hotbunk_command("doctor --json").out)["bf16_products"];
  CHECK(said["choice"] == elsewhere);
  CHECK(said["rule"] != elsewhere);
  REQUIRE(said["classes"].size() == 4);
  CHECK(said["classes"][2]["class"] == "many rows");
  CHECK(said["classes"][2]["taken"] == "oneDNN in fp32");
  for (const Json& of_class : said["classes"])
    for (const Json& path : of_class["measured"]) CHECK(path["gflop_s"].get<double>() > 0.0);
  CHECK(said["classes"][2]["measured"].size() >= 2);
}
