// Runs that ended between two things that belong together: a step's checkpoint and its lines, the last step and what
// the end of a run writes.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/json.h"
#include "tests/run/json_lines.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

/// The folder as a kill leaves it that comes after the checkpoint of the last step and before `final`.
void take_the_end_away(const fs::path& run) {
  Json record = json_from<Json>(text_of(run / "folder.json"));
  record["ended"] = false;
  record["digests"] = Json::object();
  std::ofstream(run / "folder.json") << json_text(record, 1);
  for (const char* name : {"scenario.yaml", "plan.json", "trace.json", "simulated.json", "summary.json", "report.html",
                           "perfetto.json", "run.json"})
    REQUIRE(fs::remove(run / name));
  REQUIRE(fs::remove_all(run / "checkpoints/final") > 0);
}

}  // namespace

TEST_CASE("a run that was killed behind its last step is completed by --resume; a whole one has no step left") {
  for (const int ranks : {1, 2}) {
    const fs::path whole = work_folder() / fmt::format("end_whole{}", ranks),
                   cut = work_folder() / fmt::format("end_cut{}", ranks);
    must_run(fmt::format("run {} --out {}", scenario("end", ranks, 1, "steps: 3\ncheckpoint_every: 1").string(),
                         whole.string()));
    fs::copy(whole, cut, fs::copy_options::recursive);
    take_the_end_away(cut);
    REQUIRE(hotbunk_command("report " + cut.string()).code == 2);

    const Result2 completed = hotbunk_command("run --resume " + cut.string());
    INFO(completed.err);
    REQUIRE(completed.code == 0);
    CHECK_THAT(completed.err, Catch::Contains("resuming after step 3 from ") && Catch::Contains("run's end writes"));
    for (const char* name :
         {"metrics.jsonl", "lengths.jsonl", "sync_hashes.jsonl", "samples.jsonl", "checkpoints/final/model.safetensors",
          "checkpoints/final/optimizer.safetensors", "checkpoints/final/state.json"}) {
      INFO(name);
      CHECK(fs::exists(cut / name));
      CHECK(text_of(cut / name) == text_of(whole / name));
    }
    for (const char* command : {"report ", "compare "}) must_run(command + cut.string());
    // The steps' figures are there; times are of what this process did.
    const Json summary = json_from<Json>(text_of(cut / "summary.json")),
               before = json_from<Json>(text_of(whole / "summary.json"));
    CHECK(summary["metrics"] == before["metrics"]);
    CHECK(summary["iteration_seconds"] == 0.0);

    const Result2 none = hotbunk_command("run --resume " + cut.string());
    CHECK(none.code == 2);
    CHECK_THAT(none.err, Catch::Contains("error[E424]: no step is left: the checkpoint is of step 3") &&
                             Catch::Contains("the run is whole: `hotbunk report " + cut.string()));
    must_run(fmt::format("run --resume {} --set steps=4", cut.string()));
    CHECK(lines_of(cut / "metrics.jsonl").size() == 4);
  }
}

TEST_CASE("a step's checkpoint appears after its lines: a run resumed from it lacks none") {
  const fs::path out = work_folder() / "lines";
  must_run(
      fmt::format("run {} --out {}", scenario("lines", 1, 1, "steps: 1\ncheckpoint_every: 1").string(), out.string()));
  // The next line does not fit the limit of a file's size, a checkpoint does.
  const std::string line = text_of(out / "metrics.jsonl");
  REQUIRE(line.ends_with("}\n"));
  std::ofstream(out / "metrics.jsonl") << line.substr(0, line.size() - 2) << std::string(4 << 20, ' ') << "}\n";
  const fs::path script = work_folder() / "lines.sh", err = work_folder() / "lines.err";
  std::ofstream(script) << fmt::format("ulimit -f 2048\nexec {} run --resume {} --set steps=3\n", program_file,
                                       out.string());
  const int status = std::system(fmt::format("sh {} > /dev/null 2> {}", script.string(), err.string()).c_str());
  INFO(text_of(err));
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK_THAT(text_of(err), Catch::Contains("metrics.jsonl") && Catch::Contains("(ulimit -f)"));
  CHECK_FALSE(fs::exists(out / "checkpoints/step_2"));
  must_run(fmt::format("run --resume {} --set steps=3", out.string()));
  std::vector<std::int64_t> steps;
  for (const Json& step : lines_of(out / "metrics.jsonl")) steps.push_back(step["step"]);
  CHECK(steps == std::vector<std::int64_t>{1, 2, 3});
}

TEST_CASE("steps before a kill have the same figures in metrics.jsonl as those after it") {
  const fs::path out = work_folder() / "figures";
  must_run(fmt::format("run {} --out {}", scenario("figures", 2, 1, "steps: 2\ncheckpoint_every: 1").string(),
                       out.string()));
  must_run(fmt::format("run --resume {} --set steps=4", out.string()));
  const auto lines = lines_of(out / "metrics.jsonl");
  REQUIRE(lines.size() == 4);
  for (const Json& line : lines)
    for (const auto& [key, value] : lines.back().items()) {
      INFO(key << " of step " << line["step"]);
      CHECK(line.contains(key));
    }
  for (const char* key : {"prompt_length/mean", "response_length/mean", "perf/throughput", "perf/total_num_tokens"})
    CHECK(lines.front().contains(key));
}
