// Run folders as a user makes them: one run's files and no others', and what is no run folder.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

/// A measured run of one rank with hashes and checkpoints; made once.
const fs::path& measured() {
  static const fs::path out = [] {
    fs::path folder = work_folder() / "measured";
    const Result2 r = hotbunk_command(fmt::format(
        "run {} --out {}", scenario("measured", 1, 1, "steps: 2\ncheckpoint_every: 1").string(), folder.string()));
    if (r.code != 0) throw std::runtime_error(r.err);
    return folder;
  }();
  return out;
}

/// A copy that a test may spoil.
fs::path copy_of_measured(const std::string& name) {
  const fs::path copy = work_folder() / name;
  fs::copy(measured(), copy, fs::copy_options::recursive);
  return copy;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error("no " + from);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("a simulation does not take a measured run's folder, and leaves nothing of another simulation in its own") {
  const fs::path file = scenario("measured", 1, 1, "steps: 2\ncheckpoint_every: 1");
  const fs::path taken = copy_of_measured("taken");
  const std::string trace = text_of(taken / "trace.json");
  const Result2 refused = hotbunk_command(fmt::format("simulate {} --out {}", file.string(), taken.string()));
  CHECK(refused.code == 2);
  CHECK(refused.err.find("error[E128]") != std::string::npos);
  CHECK(refused.out.empty());  // before the work
  CHECK(text_of(taken / "trace.json") == trace);
  CHECK(hotbunk_command(fmt::format("compare {}", taken.string())).code == 0);

  // Without the weights it is the simulation's: no hash and no prediction of the run stays, and the lengths are those
  // that the simulation was made with.
  fs::remove_all(taken / "checkpoints");
  std::ofstream(work_folder() / "replayed.jsonl") << text_of(measured() / "lengths.jsonl");
  CHECK(hotbunk_command(fmt::format("simulate {} --lengths {} --out {}", file.string(),
                                    (work_folder() / "replayed.jsonl").string(), taken.string()))
            .code == 0);
  CHECK_FALSE(fs::exists(taken / "sync_hashes.jsonl"));
  CHECK_FALSE(fs::exists(taken / "simulated.json"));
  CHECK(text_of(taken / "lengths.jsonl") == text_of(measured() / "lengths.jsonl"));
  CHECK(hotbunk_command(fmt::format("simulate {} --out {}", file.string(), taken.string())).code == 0);
  CHECK(text_of(taken / "lengths.jsonl") != text_of(measured() / "lengths.jsonl"));

  // Nothing was measured there, so there is nothing to compare with.
  const Result2 compared = hotbunk_command(fmt::format("compare {}", taken.string()));
  CHECK(compared.code == 2);
  CHECK(compared.err.find("error[E512]: the run folder was not measured") != std::string::npos);
  CHECK(hotbunk_command(fmt::format("report {}", taken.string())).code == 0);
}

TEST_CASE("a run over the folder of another leaves its own files only") {
  const fs::path out = copy_of_measured("reused");
  REQUIRE(fs::exists(out / "sync_hashes.jsonl"));
  REQUIRE(fs::exists(out / "checkpoints/step_2"));
  fs::create_directories(out / "checkpoints/mine");
  const Result2 run =
      hotbunk_command(fmt::format("run {} --json --set sync.verify=false --out {}",
                                  scenario("reused", 1, 1, "steps: 1\ncheckpoint_every: 1").string(), out.string()));
  INFO(run.err);
  REQUIRE(run.code == 0);
  CHECK(Json::parse(run.out)["equal"] == true);  // simulated and measured, also where nothing else says it
  CHECK_FALSE(fs::exists(out / "sync_hashes.jsonl"));
  CHECK(fs::exists(out / "checkpoints/step_1"));
  CHECK_FALSE(fs::exists(out / "checkpoints/step_2"));
  CHECK(fs::exists(out / "checkpoints/final"));
  CHECK(fs::exists(out / "checkpoints/mine"));  // no run wrote it
}

TEST_CASE("files of two runs in one folder are found out") {
  const auto refused = [](const fs::path& folder, const char* file) {
    for (const char* command : {"compare", "report"}) {
      const Result2 r = hotbunk_command(fmt::format("{} {}", command, folder.string()));
      INFO(command << '\n' << r.err);
      CHECK(r.code == 2);
      CHECK(r.err.find("error[E115]: the run folder's files are not of one plan") != std::string::npos);
      CHECK(r.err.find(fmt::format("= note: {} gives plan ", file)) != std::string::npos);
    }
  };
  const fs::path scenario_changed = copy_of_measured("scenario_changed");
  const std::string yaml = text_of(scenario_changed / "scenario.yaml");
  std::ofstream(scenario_changed / "scenario.yaml")
      << replaced(yaml, "micro_batch_tokens: 128", "micro_batch_tokens: 64");
  refused(scenario_changed, "scenario.yaml");
  for (const char* file : {"trace.json", "simulated.json"}) {
    const fs::path changed = copy_of_measured(std::string("changed_") + file);
    const std::string text = text_of(changed / file);
    const std::string hash = Json::parse(text)["plan_hash"];
    std::ofstream(changed / file) << replaced(text, hash, "0123456789abcdef");
    refused(changed, file);
  }
}

TEST_CASE("what is no run folder is called so") {
  const fs::path empty = work_folder() / "empty";
  fs::create_directories(empty);
  for (const fs::path& folder : {empty, fs::path("/nonexistent")})
    for (const char* command : {"compare", "report"}) {
      const Result2 r = hotbunk_command(fmt::format("{} {}", command, folder.string()));
      CHECK(r.code == 2);
      CHECK(r.err.find("error[E127]: no run folder: it has no scenario.yaml") != std::string::npos);
      CHECK(r.err.find("= help: give the folder of") != std::string::npos);
    }
}

TEST_CASE("outputs are refused before the work") {
  std::ofstream(work_folder() / "plain") << "no folder";
  const std::string blocked = (work_folder() / "plain" / "x").string();
  const Result2 simulated =
      hotbunk_command(fmt::format("simulate {} --out {}", scenario("blocked", 1, 1).string(), blocked));
  CHECK(simulated.code == 2);
  CHECK(simulated.err.find("error[E103]") != std::string::npos);
  CHECK(simulated.out.empty());
  const fs::path folder = copy_of_measured("blocked_snapshot");
  fs::remove(folder / "report.html");
  const Result2 reported = hotbunk_command(fmt::format("report {} --memory-snapshot {}", folder.string(), blocked));
  CHECK(reported.code == 2);
  CHECK_FALSE(fs::exists(folder / "report.html"));
}
