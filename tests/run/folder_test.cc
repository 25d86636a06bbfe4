// Run folders as a user makes them: one run's files and no others', and what is no run folder.
#include <signal.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "tests/json.h"
#include "tests/paths.h"
#include "tests/run/launched.h"

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

std::string hash_of(const fs::path& file) { return hash_text(text_of(file)); }

}  // namespace

TEST_CASE("a simulation does not take a measured run's folder, and leaves nothing of another simulation in its own") {
  const fs::path file = scenario("measured", 1, 1, "steps: 2\ncheckpoint_every: 1");
  const fs::path taken = copy_of_measured("taken");
  const std::string trace = text_of(taken / "trace.json");
  fs::remove_all(taken / "checkpoints");  // a run without them is a run
  const Result2 refused = hotbunk_command(fmt::format("simulate {} --out {}", file.string(), taken.string()));
  CHECK(refused.code == 2);
  CHECK_THAT(refused.err, Catch::Contains("error[E130]: the folder holds a run already") &&
                              Catch::Contains("a measured run of 2 steps, whole"));
  CHECK(refused.out.empty());  // before the work
  CHECK(text_of(taken / "trace.json") == trace);
  CHECK(hotbunk_command(fmt::format("compare {}", taken.string())).code == 0);

  // Over another simulation: its lengths are those that the simulation was made with.
  const fs::path simulated = work_folder() / "simulated";
  CHECK(hotbunk_command(fmt::format("simulate {} --lengths {} --out {}", file.string(),
                                    (measured() / "lengths.jsonl").string(), simulated.string()))
            .code == 0);
  CHECK(text_of(simulated / "lengths.jsonl") == text_of(measured() / "lengths.jsonl"));
  CHECK(hotbunk_command(fmt::format("simulate {} --out {}", file.string(), simulated.string())).code == 0);
  CHECK(text_of(simulated / "lengths.jsonl") != text_of(measured() / "lengths.jsonl"));

  // Nothing was measured there, so there is nothing to compare with.
  const Result2 compared = hotbunk_command(fmt::format("compare {}", simulated.string()));
  CHECK(compared.code == 2);
  CHECK(compared.err.find("error[E512]: the run folder was not measured") != std::string::npos);
  CHECK(hotbunk_command(fmt::format("report {}", simulated.string())).code == 0);
  CHECK(hotbunk_command(fmt::format("report {}", simulated.string())).code == 0);  // its own files are still of one run
}

TEST_CASE("a folder holds one run: another is refused, numbered beside it, or takes its place with --overwrite") {
  const fs::path out = copy_of_measured("reused");
  REQUIRE(fs::exists(out / "sync_hashes.jsonl"));
  REQUIRE(fs::exists(out / "checkpoints/step_2"));
  fs::create_directories(out / "checkpoints/mine");
  std::ofstream(out / "notes.txt") << "mine";
  std::ofstream(out / "checkpoints/step_1/notes.txt") << "mine";
  const std::string weights = hash_of(out / "checkpoints/final/model.safetensors");
  const std::string command =
      fmt::format("run {} --json --set sync.verify=false --out {}",
                  scenario("reused", 2, 1, "steps: 1\ncheckpoint_every: 1").string(), out.string());

  const Result2 refused = hotbunk_command(command);
  CHECK(refused.code == 2);
  CHECK_THAT(refused.err, Catch::Contains("error[E130]: the folder holds a run already") &&
                              Catch::Contains("there: checkpoints/final, ") && Catch::Contains("--overwrite"));
  CHECK(refused.err.find("starting") == std::string::npos);
  CHECK(hash_of(out / "checkpoints/final/model.safetensors") == weights);
  CHECK_FALSE(fs::exists(out / "run.lock"));
  CHECK(hotbunk_command(fmt::format("compare {}", out.string())).code == 0);

  const Result2 run = hotbunk_command(command + " --overwrite");
  INFO(run.err);
  REQUIRE(run.code == 0);
  CHECK(json_from<Json>(run.out)["equal"] == true);
  CHECK_FALSE(fs::exists(out / "sync_hashes.jsonl"));
  CHECK(fs::exists(out / "checkpoints/step_1/model.safetensors"));
  CHECK_FALSE(fs::exists(out / "checkpoints/step_2"));
  CHECK(hash_of(out / "checkpoints/final/model.safetensors") != weights);
  for (const char* mine : {"checkpoints/mine", "notes.txt", "checkpoints/step_1/notes.txt"})
    CHECK(fs::exists(out / mine));  // no run wrote it
  CHECK(hotbunk_command(fmt::format("compare {}", out.string())).code == 0);

  // Without --out: runs/NAME, runs/NAME-2, ….
  const fs::path before = fs::current_path();
  fs::create_directories(work_folder() / "numbered");
  fs::current_path(work_folder() / "numbered");
  const std::string numbered = "run " + scenario("numbered", 2, 1, "steps: 1").string();
  const Result2 first = hotbunk_command(numbered), second = hotbunk_command(numbered),
                third = hotbunk_command(numbered);
  fs::current_path(before);
  CHECK((first.code == 0 && second.code == 0 && third.code == 0));
  CHECK(first.err.find("goes to") == std::string::npos);
  CHECK_THAT(second.err,
             Catch::Contains("runs/numbered: the folder holds a run already; this run goes to runs/numbered-2\n"));
  CHECK_THAT(third.err, Catch::Contains("this run goes to runs/numbered-3\n"));
  CHECK_THAT(third.err, Catch::Contains("Next: hotbunk compare runs/numbered-3"));
  for (const char* name : {"numbered", "numbered-2", "numbered-3"})
    CHECK(hotbunk_command(fmt::format("compare {}", (work_folder() / "numbered/runs" / name).string())).code == 0);
}

TEST_CASE("--overwrite removes no model that the run starts from, and nothing that no run wrote") {
  const fs::path out = copy_of_measured("own_model");
  const std::string file = scenario("own_model", 1, 1, "steps: 1").string();
  const Result2 own = hotbunk_command(fmt::format("run {} --overwrite --set model={} --out {}", file,
                                                  (out / "checkpoints/final").string(), out.string()));
  CHECK(own.code == 2);
  CHECK_THAT(own.err, Catch::Contains("error[E133]"));
  CHECK(fs::exists(out / "checkpoints/final/model.safetensors"));
  CHECK(hotbunk_command(fmt::format("compare {}", out.string())).code == 0);

  const fs::path foreign = work_folder() / "foreign";
  fs::create_directories(foreign);
  std::ofstream(foreign / "plan.json") << "{}";
  const Result2 refused = hotbunk_command(fmt::format("run {} --overwrite --out {}", file, foreign.string()));
  CHECK(refused.code == 2);
  CHECK_THAT(refused.err, Catch::Contains("error[E132]") && Catch::Contains("there: plan.json"));
  CHECK(text_of(foreign / "plan.json") == "{}");

  // What cannot be read ends the new run before anything of the old one is touched.
  const fs::path old = copy_of_measured("unread");
  const Result2 unread = hotbunk_command(
      fmt::format("run {} --overwrite --set cluster.calibration=/nowhere.yaml --out {}", file, old.string()));
  CHECK(unread.code == 2);
  CHECK(hotbunk_command(fmt::format("compare {}", old.string())).code == 0);
}

TEST_CASE("two runs at once do not share a folder, and a killed one is not taken for a whole one") {
  const fs::path out = work_folder() / "busy";
  const std::string file = scenario("busy", 2, 1, "steps: 100000\ncheckpoint_every: 1").string();
  Running run(fmt::format("run {} --out {}", file, out.string()), work_folder() / "busy.err");
  REQUIRE(wait_for_text(out / "metrics.jsonl", "\"step\":2"));
  for (const char* more : {"", " --overwrite"}) {
    const Result2 second = hotbunk_command(fmt::format("run {} --out {}{}", file, out.string(), more));
    CHECK(second.code == 2);
    CHECK_THAT(second.err, Catch::Contains(fmt::format("error[E131]: the folder is in use by pid {} on ", run.pid())));
  }
  CHECK(hotbunk_command(fmt::format("simulate {} --set steps=1 --out {}", file, out.string())).code == 2);
  run.kill(SIGKILL);
  run.wait();
  for (const char* command : {"compare", "report"}) {
    const Result2 r = hotbunk_command(fmt::format("{} {}", command, out.string()));
    INFO(r.err);
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains("error[E134]: the run of this folder has not ended (pid ") &&
                          Catch::Contains("missing: scenario.yaml, plan.json, trace.json") &&
                          Catch::Contains("metrics.jsonl"));
  }
  // Its steps and checkpoints are kept until somebody says otherwise.
  const std::string again = fmt::format("run {} --set steps=1 --out {}", file, out.string());
  const Result2 refused = hotbunk_command(again);
  CHECK(refused.code == 2);
  CHECK_THAT(refused.err, Catch::Contains("error[E130]") && Catch::Contains("which did not end"));
  const Result2 over = hotbunk_command(again + " --overwrite");
  INFO(over.err);
  CHECK(over.code == 0);
  CHECK(text_of(out / "metrics.jsonl").find("\"step\":2") == std::string::npos);
  CHECK_FALSE(fs::exists(out / "checkpoints/step_2"));
  CHECK(hotbunk_command(fmt::format("compare {}", out.string())).code == 0);
}

TEST_CASE("files of two runs in one folder are found out") {
  // The same plan, another seed: only what is in the files tells them apart.
  const fs::path other = work_folder() / "other_seed";
  REQUIRE(
      hotbunk_command(fmt::format("run {} --set seed=7 --out {}",
                                  scenario("measured", 1, 1, "steps: 2\ncheckpoint_every: 1").string(), other.string()))
          .code == 0);
  REQUIRE(hotbunk_command(fmt::format("compare {} {}", measured().string(), other.string())).err.find("E511") ==
          std::string::npos);
  for (const char* file : {"scenario.yaml", "trace.json", "simulated.json", "lengths.jsonl"}) {
    const fs::path mixed = copy_of_measured(std::string("mixed_") + file);
    fs::copy_file(other / file, mixed / file, fs::copy_options::overwrite_existing);
    for (const char* command : {"compare", "report"}) {
      const Result2 r = hotbunk_command(fmt::format("{} {}", command, mixed.string()));
      INFO(command << '\n' << r.err);
      CHECK(r.code == 2);
      CHECK_THAT(r.err, Catch::Contains("error[E115]: the run folder's files are not of one run") &&
                            Catch::Contains(fmt::format("= note: {} is not as the run wrote it", file)));
    }
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

TEST_CASE("what the end of a run needs is read before its first step") {
  const std::string file = scenario("unreadable", 2, 1, "steps: 1").string();
  std::ofstream(work_folder() / "not.yaml") << "no: profile\n";
  for (const fs::path& profile : {fs::path("/nowhere.yaml"), work_folder() / "not.yaml"}) {
    const fs::path out = work_folder() / "unreadable";
    const Result2 r = hotbunk_command(
        fmt::format("run {} --set cluster.calibration={} --out {}", file, profile.string(), out.string()));
    INFO(r.err);
    CHECK(r.code == 2);
    CHECK(r.err.find("starting") == std::string::npos);
    CHECK(r.err.find("step 1") == std::string::npos);
    CHECK_FALSE(fs::exists(out / "metrics.jsonl"));
  }
  // The catalogue's entry for the device, which only prices read.
  const fs::path catalogue = work_folder() / "catalogue";
  fs::copy(fs::path(source_folder) / "scenarios/catalog", catalogue, fs::copy_options::recursive);
  std::ofstream(catalogue / "profiles/local-cpu.yaml") << "no: profile\n";
  ::setenv("HOTBUNK_CATALOG", catalogue.c_str(), 1);
  const fs::path out = work_folder() / "unreadable_entry";
  const Result2 r = hotbunk_command(fmt::format("run {} --out {}", file, out.string()));
  ::unsetenv("HOTBUNK_CATALOG");
  INFO(r.err);
  CHECK(r.code == 2);
  CHECK_THAT(r.err, Catch::Contains("profiles/local-cpu.yaml") && !Catch::Contains("starting"));
  CHECK_FALSE(fs::exists(out / "metrics.jsonl"));
}

TEST_CASE("a file that cannot be written at the end loses no other, and is a failure at run time") {
  // A limit on the size of files is a full disk that needs no root: small files pass, traces do not.
  const fs::path out = work_folder() / "limited";
  const std::string file = scenario("limited", 1, 1, "steps: 2").string();
  const fs::path script = work_folder() / "limited.sh";
  std::ofstream(script) << fmt::format("ulimit -f 100\nexec {} run {} --out {} --json\n", program_file, file,
                                       out.string());
  const int status =
      std::system(fmt::format("sh {} > {} 2> {}", script.string(), (work_folder() / "limited.out").string(),
                              (work_folder() / "limited.err").string())
                      .c_str());
  const std::string err = text_of(work_folder() / "limited.err");
  INFO(err);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK_THAT(err, Catch::Contains("error[E633]: not all files of the run folder could be written") &&
                      Catch::Contains("not written: trace.json: cannot write file: File too large") &&
                      Catch::Contains("written: summary.json, scenario.yaml"));
  CHECK(json_from<Json>(text_of(work_folder() / "limited.out"))["metrics"].size() == 2);  // nothing computed is lost
  CHECK_THAT(text_of(out / "metrics.jsonl"), Catch::Contains("\"step\":2"));
  CHECK_FALSE(fs::exists(out / "trace.json"));
  for (const auto& entry : fs::directory_iterator(out)) CHECK(entry.path().extension() != ".partial");
  const Result2 compared = hotbunk_command(fmt::format("compare {}", out.string()));
  CHECK(compared.code == 2);
  CHECK_THAT(compared.err, Catch::Contains("error[E134]") && Catch::Contains("trace.json"));
}

TEST_CASE("a full disk is a failure at run time: what fits is written, each file whole or not at all") {
  if (::geteuid() != 0) return;  // mounting needs root
  const fs::path disk = work_folder() / "disk";
  fs::create_directories(disk);
  if (std::system(fmt::format("mount -t tmpfs -o size=256k none {} 2> /dev/null", disk.string()).c_str()) != 0) return;
  const Result2 r = hotbunk_command(
      fmt::format("run {} --out {}", scenario("disk", 2, 1, "steps: 2").string(), (disk / "run").string()));
  const std::string metrics = text_of(disk / "run/metrics.jsonl");
  bool partial = false;
  for (const auto& entry : fs::directory_iterator(disk / "run")) partial |= entry.path().extension() == ".partial";
  CHECK(std::system(fmt::format("umount {}", disk.string()).c_str()) == 0);
  INFO(r.err);
  CHECK(r.code == 3);
  CHECK_THAT(r.err, Catch::Contains("No space left on device"));
  CHECK_THAT(metrics, Catch::Contains("\"step\":2"));
  CHECK_THAT(r.out, Catch::Contains("measured over 2 steps"));
  CHECK_FALSE(partial);
}

TEST_CASE("the folder of many ranks no two of which are alike is small too") {
  const fs::path out = work_folder() / "unlike";
  const Result2 r = hotbunk_command(
      fmt::format("simulate {}/scenarios/qwen2.5-7b-fsdp8.yaml --set cluster.nodes=128 --set train.layout.dp=1024 "
                  "--set rollout.layout.dp=256 --set sync.transport=collective --set algorithm.prompts=1024 --set "
                  "workload.response_tokens.mean=128 --set workload.response_tokens.max=512 --out {}",
                  source_folder, out.string()));
  REQUIRE(r.code == 0);
  CHECK_THAT(r.out, Catch::Contains("ranks no two of which are alike") && Catch::Contains("--ops RANK"));
  std::uintmax_t bytes = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(out)) bytes += entry.file_size();
  CHECK(bytes < 25'000'000);
}

TEST_CASE("a simulation's folder is small, whole, and has ops and buffers of the ranks that were asked for") {
  const std::string file = std::string(source_folder) + "/scenarios/qwen2.5-7b-fsdp8.yaml";
  const std::string small =
      "--set algorithm.prompts=16 --set workload.response_tokens.mean=16 "
      "--set workload.response_tokens.max=50";
  const fs::path calls = work_folder() / "by_call", ops = work_folder() / "by_op";
  REQUIRE(hotbunk_command(fmt::format("simulate {} {} --out {}", file, small, calls.string())).code == 0);
  REQUIRE(hotbunk_command(fmt::format("simulate {} {} --ops 3,1 --out {}", file, small, ops.string())).code == 0);
  std::uintmax_t bytes = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(calls)) bytes += entry.file_size();
  CHECK(bytes < 25'000'000);

  // The same times whatever is kept, but for steps that are summed.
  const auto summary = [](const fs::path& folder) { return json_from<Json>(text_of(folder / "summary.json")); };
  const double together = summary(calls)["iteration_seconds"].get<double>();
  CHECK(summary(ops)["iteration_seconds"].get<double>() == Approx(together).epsilon(1e-5));
  CHECK(summary(ops)["memory"] == summary(calls)["memory"]);
  CHECK(summary(ops)["traffic"] == summary(calls)["traffic"]);

  const std::string snapshot = (work_folder() / "snapshot.pickle").string();
  const Result2 refused = hotbunk_command(fmt::format("report {} --memory-snapshot {}", calls.string(), snapshot));
  CHECK(refused.code == 2);
  CHECK(refused.err.find("error[E135]") != std::string::npos);
  CHECK_FALSE(fs::exists(snapshot));
  CHECK(hotbunk_command(fmt::format("report {} --memory-snapshot {}", ops.string(), snapshot)).code == 0);
  CHECK(fs::exists(snapshot));
  const Result2 nobody = hotbunk_command(fmt::format("simulate {} --ops 8", file));
  CHECK(nobody.code == 2);
  CHECK(nobody.err.find("error[E143]") != std::string::npos);
}

TEST_CASE("a simulation's folder is bounded: lengths of as many iterations as there is room for, counts of all") {
  const std::string job = fmt::format(
      "simulate {} --set algorithm.prompts=16384 --set steps=5 --set workload.response_tokens.mean=64 "
      "--set workload.response_tokens.max=64 --set workload.response_tokens.distribution=fixed",
      fmt::format("{}/scenarios/qwen2.5-32b-megatron.yaml", source_folder));
  const fs::path some = work_folder() / "some_lengths", all = work_folder() / "all_lengths";
  const Result2 bounded = hotbunk_command(fmt::format("{} --out {}", job, some.string()));
  REQUIRE(bounded.code == 0);
  CHECK_THAT(bounded.out, Catch::Contains("lengths.jsonl has those of the first 3 of 5 iterations"));
  std::uintmax_t bytes = 0;
  for (const auto& file : fs::directory_iterator(some)) bytes += file.file_size();
  CHECK(bytes < 25'000'000);
  const Result2 whole = hotbunk_command(fmt::format("{} --all-lengths --out {}", job, all.string()));
  REQUIRE(whole.code == 0);
  CHECK_THAT(whole.out, !Catch::Contains("lengths.jsonl has"));
  const std::string of_all = text_of(all / "lengths.jsonl"), of_some = text_of(some / "lengths.jsonl");
  CHECK(std::ranges::count(of_some, '\n') == 3);
  CHECK(std::ranges::count(of_all, '\n') == 5);
  CHECK(of_all.starts_with(of_some));
  // The report counts every response, whatever the file has of them.
  const auto counts = [](const fs::path& folder) {
    const std::string report = text_of(folder / "report.html");
    const auto at = report.find("\"lengths\":{");
    REQUIRE(at != std::string::npos);
    return report.substr(at, 80);
  };
  CHECK(counts(some) == counts(all));
}
