// The program from the outside: plan, simulate, run, compare, report; determinism; capacity; a killed rank.
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/cores.h"
#include "base/hash.h"
#include "spec/safetensors.h"
#include "tests/json.h"
#include "tests/paths.h"
#include "tests/run/launched.h"

using namespace hotbunk;
using Json = nlohmann::json;

TEST_CASE("plan, simulate, run, compare and report agree and leave a whole run folder") {
  const fs::path file = scenario("line", 2, 2, "steps: 2");
  const Result2 plan = hotbunk_command(fmt::format("plan {} --json", file.string()));
  REQUIRE(plan.code == 0);
  const Json planned = json_from<Json>(plan.out);
  CHECK(planned["schema"] == "hotbunk.plan/1");
  const Result2 simulated = hotbunk_command(fmt::format("simulate {} --json", file.string()));
  REQUIRE(simulated.code == 0);
  const Json sim = json_from<Json>(simulated.out);
  CHECK(sim["schema"] == "hotbunk.trace-summary/1");
  CHECK(sim["source"] == "simulated");
  CHECK(sim["memory"]["peak_bytes"] == planned["peak_bytes"]);

  const fs::path out = work_folder() / "line";
  const Result2 run = hotbunk_command(fmt::format("run {} --json --check --out {}", file.string(), out.string()));
  INFO(run.err);
  REQUIRE(run.code == 0);
  const Json measured = json_from<Json>(run.out);
  CHECK(measured["source"] == "measured");
  CHECK(measured["plan_hash"] == sim["plan_hash"]);
  CHECK(measured["memory"] == sim["memory"]);  // lengths do not move a peak: capacities do
  CHECK(measured["metrics"].size() == 2);
  for (const char* name : {"plan.json", "trace.json", "summary.json", "metrics.jsonl", "report.html", "lengths.jsonl",
                           "scenario.yaml", "checkpoints/final/model.safetensors", "checkpoints/final/config.json"})
    CHECK(fs::exists(out / name));

  const Result2 compared = hotbunk_command(fmt::format("compare {} --json", out.string()));
  CHECK(compared.code == 0);
  CHECK(json_from<Json>(compared.out)["equal"] == true);
  const std::string before = text_of(out / "summary.json");
  CHECK(hotbunk_command(fmt::format("report {}", out.string())).code == 0);
  CHECK(text_of(out / "summary.json") == before);
}

TEST_CASE("the same scenario gives the same plan, simulation and run, bit for bit") {
  const fs::path file = scenario("twice", 4, 2, "steps: 2");
  const auto simulate = [&] { return hotbunk_command(fmt::format("simulate {} --json", file.string())).out; };
  CHECK(simulate() == simulate());
  // Hashes of a run cover tokens, weights, bytes and metrics, never measured times.
  const auto run = [&](const char* name, const char* more) {
    const fs::path out = work_folder() / name;
    REQUIRE(hotbunk_command(fmt::format("run {} --out {} {}", file.string(), out.string(), more)).code == 0);
    const Json summary = json_from<Json>(text_of(out / "summary.json"));
    return hash_text(text_of(out / "checkpoints/final/model.safetensors")) + text_of(out / "lengths.jsonl") +
           json_text(summary["memory"]) + json_text(summary["traffic"]) + json_text(summary["metrics"]) +
           json_text(summary["run_hash"]);
  };
  const std::string first = run("twice1", "");
  CHECK(first == run("twice2", ""));
  // Over sockets as over shared memory: sums run in rank order on both.
  CHECK(run("twice3", "--set sync.transport=collective") ==
        run("twice4", "--set sync.transport=collective --transport gloo"));
}

TEST_CASE("two runs of one hash have the same weights; it covers what forms products, and no count of steps") {
  // A rate by which a rounding of the gradient reaches the weights in one step.
  const fs::path file = scenario("hashed", 1, 1, "steps: 1\noptimizer: {lr: 2.0e-3}");
  struct Hashed {
    std::string hash, products, sets, weights;  // weights: after step 1
  };
  std::vector<Hashed> all;
  const auto run = [&](const std::string& name, const std::string& more) {
    const fs::path out = work_folder() / name;
    REQUIRE(hotbunk_command(fmt::format("run {} --out {} {}", file.string(), out.string(), more)).code == 0);
    const Json walked = json_from<Json>(text_of(out / "run.json"));
    const std::string before = text_of(out / "summary.json");
    CHECK(json_from<Json>(before)["run_hash"] == walked["run_hash"]);
    CHECK(hotbunk_command(fmt::format("report {}", out.string())).code == 0);  // it keeps what only the run knew
    CHECK(text_of(out / "summary.json") == before);
    const fs::path first = out / "checkpoints/step_1", last = out / "checkpoints/final";
    return all.emplace_back(Hashed{walked["run_hash"], walked["bf16_products"], walked["instruction_sets"],
                                   hash_text(text_of((fs::exists(first) ? first : last) / "model.safetensors"))});
  };
  const Hashed whole = run("hashed1", "--threads 1");
  CHECK(whole.hash.size() == 32);
  CHECK(run("hashed2", "--threads 1 --trace-steps 1 --check").hash == whole.hash);
  CHECK(run("hashed3", "--threads 1 --set optimizer.lr=0.5").hash != whole.hash);
  CHECK(run("hashed4", "--threads 2").hash != whole.hash);
  CHECK(run("hashed_longer", "--threads 1 --set steps=2 --set checkpoint_every=1").hash == whole.hash);
  // What computes nothing else on this machine has the same hash. fp32 is oneDNN's too, where bf16 is widened in both.
  for (const char* set : {"AVX512_CORE", "AVX2"}) {
    const EnvironmentVariable lowered("ONEDNN_MAX_CPU_ISA", set);
    const Hashed low = run(fmt::format("hashed_{}", set), "--threads 1");
    CHECK(low.products == "widened to fp32");
    CHECK((low.hash == whole.hash) == (low.products == whole.products && low.sets == whole.sets));
  }
  for (const Hashed& a : all)
    for (const Hashed& b : all) {
      INFO(a.sets << ", " << a.products << "; " << b.sets << ", " << b.products);
      if (a.hash == b.hash) CHECK(a.weights == b.weights);
    }
}

TEST_CASE("a run that goes on where products are formed in another way says so, also after one that was killed") {
  const auto goes_on = [](const fs::path& from, const std::string& name) {
    const Result2 on = hotbunk_command(
        fmt::format("run --set steps=2 --resume {} --out {}", from.string(), (work_folder() / name).string()));
    INFO(on.err);
    CHECK(on.code == 0);
    return on.err;
  };
  const std::string warned = "warning[E425]: products are formed in another way there: ";
  for (const std::string type : {"fp32", "bf16"}) {
    CAPTURE(type);
    const fs::path out = work_folder() / ("elsewhere_" + type);
    REQUIRE(hotbunk_command(fmt::format("run {} --set train.precision.params={} --set rollout.dtype={} --out {}",
                                        scenario("elsewhere", 1, 1, "steps: 1").string(), type, type, out.string()))
                .code == 0);
    const Json walked = json_from<Json>(text_of(out / "run.json"));
    const Json state = json_from<Json>(text_of(out / "checkpoints/final/state.json"));
    CHECK(state.value("instruction_sets", "") == walked["instruction_sets"]);
    CHECK(state.value("bf16_products", "none") == (type == "bf16" ? walked["bf16_products"] : Json("")));
    CHECK_THAT(goes_on(out, "elsewhere_same_" + type), !Catch::Contains("E425"));
    // The checkpoint says it: a run that was killed has no run.json, and one that was changed is not looked at.
    if (type == "fp32") fs::remove(out / "run.json");
    else std::ofstream(out / "run.json") << R"({"bf16_products": 5})";
    const EnvironmentVariable lowered("ONEDNN_MAX_CPU_ISA", "AVX2");
    const std::string said = goes_on(out, "elsewhere_lowered_" + type);
    const bool other_set = walked["instruction_sets"].get<std::string>().find("oneDNN's AVX2 ") == std::string::npos;
    // A choice without the unit is one that the lowered machine can follow too.
    const bool other_products =
        type == "bf16" && !walked["bf16_products"].get<std::string>().starts_with("widened to fp32");
    CHECK((said.find(warned) != std::string::npos) == (other_set || other_products));
    CHECK((said.find("oneDNN's AVX2 and own kernels'") != std::string::npos) == other_set);
    CHECK((said.find("those of bf16 by") != std::string::npos) == other_products);
  }
}

TEST_CASE("a verified sync leaves hashes of tensors that no layout changes") {
  const auto first_sync = [](int ranks, int tp) {
    const std::string name = fmt::format("hashes{}x{}", ranks, tp);
    const fs::path out = work_folder() / name;
    REQUIRE(
        hotbunk_command(fmt::format("run {} --out {}", scenario(name, ranks, tp, "steps: 2").string(), out.string()))
            .code == 0);
    const std::string lines = text_of(out / "sync_hashes.jsonl");
    const Json first = json_from<Json>(lines.substr(0, lines.find('\n')));
    const Json second = json_from<Json>(lines.substr(lines.find('\n') + 1));
    CHECK(second["step"] == 2);
    CHECK(second["tensors"] != first["tensors"]);  // training has changed them
    CHECK(first["tensors"].size() == 20);          // embedding, norm; 9 of each layer
    const std::string metrics = text_of(out / "metrics.jsonl");
    CHECK(json_from<Json>(metrics.substr(0, metrics.find('\n')))["sync/tensors_verified"] == 20);
    return first;
  };
  const Json one = first_sync(1, 1);
  CHECK(one["step"] == 1);
  CHECK(one["dtype"] == "fp32");
  CHECK(first_sync(2, 2) == one);
  CHECK(first_sync(4, 2) == one);
  const fs::path off = work_folder() / "no_hashes";
  REQUIRE(hotbunk_command(fmt::format("run {} --set sync.verify=false --out {}", scenario("no_hashes", 1, 1).string(),
                                      off.string()))
              .code == 0);
  CHECK_FALSE(fs::exists(off / "sync_hashes.jsonl"));
}

TEST_CASE("a launch of the wrong size is refused at once") {
  const fs::path file = scenario("launched", 2, 1);
  const auto start = std::chrono::steady_clock::now();
  const fs::path said = work_folder() / "launched.err";
  const ReservedPort port;  // nobody listens there
  Running rank("run " + file.string(), said, rank_variables(1, 3, port));
  const int code = rank.wait();
  const std::string err = text_of(said);
  CHECK(code == 2);
  CHECK(err.find("error[E704]: the plan has 2 ranks, but 3 processes were launched (torchrun)") != std::string::npos);
  // Nobody waited for a rendezvous that cannot be: that takes 60 s and more.
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));
}

TEST_CASE("data that cannot be read is said once, before ranks start") {
  const fs::path file = scenario("no_data", 2, 1);
  const Result2 refused = hotbunk_command(fmt::format(
      "run {} --set algorithm.name=sft --set \"task.name=''\" --set task.data=/nowhere/samples.jsonl", file.string()));
  CHECK(refused.code == 2);
  const auto first = refused.err.find("error[E101]");
  CHECK(first != std::string::npos);
  CHECK(refused.err.find("error[", first + 1) == std::string::npos);
  CHECK(refused.err.find("starting") == std::string::npos);
}

TEST_CASE("a plan is the same on hosts of any memory") {
  const fs::path file = scenario("hosts", 2, 1);
  const auto hash = [&](const char* host) {
    const Result2 plan =
        hotbunk_command(fmt::format("plan {} --json --set cluster.host_memory_gib={}", file.string(), host));
    REQUIRE(plan.code == 0);
    return json_from<Json>(plan.out)["plan_hash"];
  };
  CHECK(hash("4") == hash("64"));
}

TEST_CASE("a run folder finds its calibration profile from anywhere") {
  const fs::path file = scenario("profiled", 1, 1, "steps: 1"), out = work_folder() / "profiled";
  const fs::path profile = work_folder() / "here.yaml";
  REQUIRE(hotbunk_command(fmt::format("calibrate {} --out {}", file.string(), profile.string())).code == 0);
  const fs::path before = fs::current_path();
  fs::current_path(work_folder());
  const Result2 run =
      hotbunk_command(fmt::format("run {} --set cluster.calibration=here.yaml --out {}", file.string(), out.string()));
  fs::current_path(before);
  INFO(run.err);
  REQUIRE(run.code == 0);
  const Result2 compared = hotbunk_command(fmt::format("compare {}", out.string()));
  INFO(compared.err);
  CHECK(compared.code == 0);
}

TEST_CASE("calibrate says when other programs kept the cores busy") {
  const fs::path file = scenario("disturbed", 1, 1, "steps: 1"), profile = work_folder() / "disturbed.yaml";
  std::vector<pid_t> others;
  for (std::int64_t core = 0; core < local_cores(); ++core)
    if (const pid_t child = ::fork(); child == 0)
      for (std::atomic<int> spin = 0;; ++spin) continue;
    else others.push_back(child);
  const Result2 r = hotbunk_command(fmt::format("calibrate {} --steps 50 --out {}", file.string(), profile.string()));
  for (const pid_t child : others) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
  INFO(r.err);
  CHECK(r.code == 0);
  CHECK_THAT(r.err, Catch::Contains("warning[E427]: the cores were not quiet"));
  CHECK_THAT(text_of(profile), Catch::Contains("50 iterations") && Catch::Contains("other programs kept"));
}

TEST_CASE("calibrate times as many iterations as take some seconds, and not above 32") {
  const fs::path file = scenario("short", 1, 1, "steps: 1"), profile = work_folder() / "short.yaml";
  const Result2 r = hotbunk_command(fmt::format("calibrate {} --out {}", file.string(), profile.string()));
  INFO(r.err);
  REQUIRE(r.code == 0);
  CHECK_THAT(text_of(profile), Catch::Contains("1 ranks, 32 iterations of scenario short"));
}

TEST_CASE("a plan that does not fit is refused, and the arena enforces the same number") {
  const fs::path file = scenario("tight", 2, 1);
  const Result2 fits = hotbunk_command(fmt::format("plan {} --json", file.string()));
  REQUIRE(fits.code == 0);
  const std::int64_t mapped = json_from<Json>(fits.out)["mapped_peak_bytes"];
  const std::string smaller = fmt::format("{} --set cluster.device_memory_mib={}", file.string(),
                                          static_cast<double>(mapped - 4096) / (1 << 20));
  for (const char* command : {"plan", "simulate", "run"}) {
    const Result2 refused = hotbunk_command(fmt::format("{} {}", command, smaller));
    CHECK(refused.code == 1);
    CHECK(refused.err.find("error[E301]: the plan does not fit: rank 0 needs") != std::string::npos);
    // The phase that fills the memory and the tensors that fill it: one moment.
    CHECK(refused.err.find("device memory in phase train\n") != std::string::npos);
    CHECK(refused.err.find("largest at the peak: train.") != std::string::npos);
    CHECK(refused.err.find("= help: ") != std::string::npos);
  }
  const Result2 forced =
      hotbunk_command(fmt::format("run {} --no-fit-check --out {}", smaller, (work_folder() / "forced").string()));
  CHECK(forced.code == 3);
  CHECK_THAT(forced.err, Catch::Contains("error[E301]: the plan does not fit: rank ") &&
                             Catch::Contains(" on the device in phase load\n") &&
                             Catch::Contains(fmt::format("capacity {} B: 4096 B too much", mapped - 4096)) &&
                             Catch::Contains("large: '") && !Catch::Contains("op ''") && !Catch::Contains("E602"));
}

TEST_CASE("run refuses a plan that drifted") {
  const fs::path file = scenario("drift", 1, 1);
  const fs::path saved = work_folder() / "saved.json";
  REQUIRE(hotbunk_command(fmt::format("plan {} --out {}", file.string(), saved.string())).code == 0);
  const fs::path out = work_folder() / "drift";
  CHECK(hotbunk_command(fmt::format("run {} --plan {} --out {}", file.string(), saved.string(), out.string())).code ==
        0);
  const Result2 drifted = hotbunk_command(
      fmt::format("run {} --plan {} --set train.recompute=full --out {}", file.string(), saved.string(), out.string()));
  CHECK(drifted.code == 2);
  CHECK(drifted.err.find("error[E510]") != std::string::npos);
  CHECK(drifted.err.find("= note: ~ ") != std::string::npos);  // what differs, not only that it does
}

TEST_CASE("killing one rank stops the others within seconds and names it") {
  const fs::path file = scenario("killed", 4, 2, "steps: 100000");
  const fs::path err = work_folder() / "killed.err";
  Running run(fmt::format("run {} --out {}", file.string(), (work_folder() / "killed").string()), err);
  REQUIRE(wait_for_text(err, "step 1/"));
  const std::vector<int> ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 4);
  ::kill(ranks[2], SIGKILL);
  int code = 0;
  REQUIRE(run.ended_within(40.0, code));  // far beyond the seconds it takes, so that a busy machine is no failure
  CHECK(code == 3);
  const std::string said = text_of(err);
  INFO(said);
  CHECK(said.find(fmt::format("(pid {})", ranks[2])) != std::string::npos);
  CHECK(said.find("while in phase") != std::string::npos);
  CHECK(said.find(", op ") != std::string::npos);
  for (int pid : ranks) CHECK(::kill(pid, 0) != 0);
  // The finished steps are not lost, and nothing claims to be a whole run.
  std::ifstream steps(work_folder() / "killed/metrics.jsonl");
  std::string line;
  REQUIRE(std::getline(steps, line));
  CHECK(json_from<Json>(line)["step"] == 1);
  CHECK(json_from<Json>(line).contains("actor/grad_norm"));
  CHECK(json_from<Json>(line).contains("timing_s/step"));
  CHECK_FALSE(fs::exists(work_folder() / "killed/trace.json"));
}

TEST_CASE("what is bad is refused with exit code 2 and a message that helps") {
  const fs::path file = scenario("bad", 2, 1);
  for (const char* arguments : {"plan /nonexistent.yaml", "frobnicate", "plan", "run --transport pigeon x.yaml",
                                "compare /nonexistent", "report /nonexistent"}) {
    INFO(arguments);
    const Result2 r = hotbunk_command(arguments);
    CHECK(r.code == 2);
    CHECK(!r.err.empty());
  }
  const Result2 r = hotbunk_command(fmt::format("plan {} --set rollout.layout.tp=3", file.string()));
  CHECK(r.code == 2);
  CHECK(r.err.find("error[E2") != std::string::npos);
}

TEST_CASE("a run folder that cannot be written is refused before any work, and so is an unknown command") {
  const fs::path file = scenario("nowhere", 2, 2, "steps: 1");
  const fs::path blocked = work_folder() / "a-file" / "runs";
  std::ofstream(work_folder() / "a-file") << "no folder";
  for (const char* command : {"run", "calibrate"}) {
    const Result2 r = hotbunk_command(fmt::format("{} {} --out {}", command, file.string(), blocked.string()));
    CHECK(r.code == 2);
    CHECK(r.err.find("error[E103]: cannot create the file's folder: Not a directory") != std::string::npos);
    CHECK(r.err.find("starting") == std::string::npos);  // no rank was started
    CHECK(r.err.find("E603") == std::string::npos);
  }
  const Result2 unknown = hotbunk_command("simulat x.yaml");
  CHECK(unknown.code == 2);
  CHECK_THAT(unknown.err, Catch::StartsWith("error[E126]: there is no command 'simulat'\n  --> hotbunk\n") &&
                              Catch::EndsWith("   = help: did you mean simulate?\n"));
}

TEST_CASE(
    "a shortage of host memory names what the host holds; a name with a path in it makes no run folder elsewhere") {
  const fs::path file = scenario("host", 2, 2);
  const Result2 host = hotbunk_command(fmt::format("plan {} --set cluster.host_memory_gib=0.00001", file.string()));
  CHECK(host.code == 1);
  CHECK(host.err.find("host memory in phase sleep_") != std::string::npos);
  CHECK(host.err.find("largest at the peak: host.") != std::string::npos);
  const Result2 name = hotbunk_command(fmt::format("run {} --set name=../escaped", file.string()));
  CHECK(name.code == 2);
  CHECK(name.err.find("error[E226]: the scenario's name '../escaped'") != std::string::npos);
}
