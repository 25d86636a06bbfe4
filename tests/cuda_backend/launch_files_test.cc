// scripts/slurm/run.sbatch and scripts/kubernetes/run.yaml on this host: a stand-in for srun, and two processes that
// are started as the manifest's pods are, each rank on a double of its own.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <regex>

#include "tests/cuda_backend/iteration.h"
#include "tests/cuda_backend/runs.h"
#include "tests/reserved_port.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// A free port of those that a Slurm job's number stands for: 20000 + number mod 10000.
ReservedPort slurm_port() {
  for (int number = 20'000; number < 30'000; ++number) try {
      return ReservedPort(number);
    } catch (const std::runtime_error&) {
    }
  throw std::runtime_error("no free port of Slurm's");
}

void write_program(const fs::path& file, const std::string& text) {
  REQUIRE(write_file_atomic(file, text));
  fs::permissions(file, fs::perms::owner_all);
}

/// Options of a batch script, as sbatch reads them: "#SBATCH --name=value".
std::map<std::string, std::string> batch_options(const std::string& script) {
  static const std::regex option(R"(#SBATCH --([a-z-]+)=(\S+))");
  std::map<std::string, std::string> out;
  std::istringstream in(script);
  for (std::string line; std::getline(in, line) && line.starts_with('#');)
    if (std::smatch found; std::regex_match(line, found, option)) out[found[1]] = found[2];
  return out;
}

/// Starts a process per task, two nodes of one each on this host, with the variables of a job's step. Like srun since
/// Slurm 22.05 it gives a task the cores that its own option says, whatever the job's says. Ends with the highest code.
constexpr const char* srun = R"(#!/usr/bin/env bash
cpus=1
while [[ "$1" == --* ]]; do
  case "$1" in
    --cpus-per-task=*) cpus="${1#*=}" ;;
    --kill-on-bad-exit=0) ;;
    *) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
  esac
  shift
done
echo "$cpus cores, a token of ${#HOTBUNK_TOKEN}" > "$STAND_IN/given"
tasks=() signals=0
trap 'signals=$((signals + 1)); kill -TERM "${tasks[@]}"' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURM_CPUS_PER_TASK=$cpus "$@" &
  tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
  before=-1
  while [ "$before" != "$signals" ]; do before=$signals code=0; wait "$task" || code=$?; done
  [ "$code" -le "$highest" ] || highest=$code
done
exit "$highest"
)";

}  // namespace

TEST_CASE(
    "scripts/slurm/run.sbatch: srun's processes are one run, told to stop when time is nearly up; a failure is its "
    "status") {
  const Folder folder;
  write_program(folder.root / "srun", srun);
  REQUIRE(write_file_atomic(folder.root / "tiny.yaml", tiny_job_text));
  // sbatch runs a copy, elsewhere, in the folder that it was called in.
  const std::string script = read_file(fs::path(source_folder) / "scripts/slurm/run.sbatch").value_or("");
  REQUIRE(write_file_atomic(folder.root / "slurm_script", script));
  const auto options = batch_options(script);
  CHECK(options.at("ntasks-per-node") == options.at("gpus-per-node"));
  CHECK(options.at("signal").starts_with("TERM@"));  // to the processes: "B:" would be the shell's alone
  const ReservedPort port = slurm_port();
  const auto batch = [&](const std::string& name, const std::string& arguments, const std::string& meanwhile) {
    return folder.command(
        fmt::format(
            "cd {0} && {{ PATH=\"{0}:$PATH\" STAND_IN={0} HOTBUNK={1} HOTBUNK_BACKEND=cuda-fake SLURM_NTASKS=2 "
            "SLURM_CPUS_PER_TASK={2} SLURM_JOB_ID={3} SLURM_JOB_NODELIST=localhost,node2 bash slurm_script {4} & "
            "job=$!; {5} wait $job; }}",
            folder.root.string(), program_file, options.at("cpus-per-task"), port.number(), arguments, meanwhile),
        name);
  };
  const Ended usage = batch("usage", "", "");
  CHECK(usage.code != 0);
  CHECK_THAT(usage.err, Catch::Contains("usage: sbatch run.sbatch SCENARIO"));

  const Ended stopped = batch("stopped", "tiny.yaml --set steps=100000 --set sync.transport=collective --out out",
                              "until [ -s out/metrics.jsonl ] || ! kill -0 $job; do sleep 0.1; done; kill -TERM $job;");
  INFO(stopped.err);
  CHECK(stopped.code == 0);
  CHECK(read_file(folder.root / "given").value_or("") == options.at("cpus-per-task") + " cores, a token of 32\n");
  const auto steps = folder.lines("out", "metrics.jsonl").size();
  CHECK(steps >= 1);
  CHECK(steps < 100'000);
  CHECK(fs::exists(folder.root / "out/checkpoints/final/model.safetensors"));
  CHECK(fs::exists(folder.root / fmt::format("out/checkpoints/step_{}/state.json", steps)));

  const Ended failed = batch("failed", "tiny.yaml --fake-fault cuLaunchKernel:50 --out failed_out", "");
  INFO(failed.err);
  CHECK(failed.code == 3);
  CHECK_THAT(failed.err, Catch::Contains("rank ") && Catch::Contains("phase ") && Catch::Contains("cuLaunchKernel("));
}

namespace {

/// The manifest's pods, as Kubernetes would make them of its service and its job.
class Pods {
 public:
  Pods() {
    for (const YAML::Node& n : YAML::LoadAllFromFile(std::string(source_folder) + "/scripts/kubernetes/run.yaml"))
      (n["kind"].as<std::string>() == "Service" ? service : job) = n;
    spec = job["spec"]["template"]["spec"];
    container = spec["containers"][0];
  }
  /// A variable of the container; what is not written there comes from where the manifest says.
  std::string variable(const YAML::Node& entry, int index) const {
    if (entry["value"]) return entry["value"].as<std::string>();
    const YAML::Node from = entry["valueFrom"];
    if (from["secretKeyRef"]) return "a secret";
    // Of Jobs with completionMode Indexed.
    CHECK(from["fieldRef"]["fieldPath"].as<std::string>() ==
          "metadata.annotations['batch.kubernetes.io/job-completion-index']");
    return std::to_string(index);
  }
  std::map<std::string, std::string> variables(int index) const {
    std::map<std::string, std::string> out;
    for (const YAML::Node& entry : container["env"]) out[entry["name"].as<std::string>()] = variable(entry, index);
    return out;
  }

  YAML::Node service, job, spec, container;
};

std::string text(const YAML::Node& n) { return n.as<std::string>(); }

}  // namespace

TEST_CASE(
    "scripts/kubernetes/run.yaml: two pods are one run, with the numbers of threads of one process; they take "
    "SIGTERM") {
  const Pods pods;
  // What the API server and the job's controller hold it to, and what makes a name of pod 0.
  CHECK(text(pods.job["spec"]["completionMode"]) == "Indexed");
  CHECK(text(pods.job["spec"]["completions"]) == text(pods.job["spec"]["parallelism"]));
  CHECK(text(pods.spec["restartPolicy"]) == "Never");
  CHECK(text(pods.spec["subdomain"]) == text(pods.service["metadata"]["name"]));
  CHECK(text(pods.service["spec"]["clusterIP"]) == "None");
  CHECK(text(pods.service["spec"]["publishNotReadyAddresses"]) == "true");  // ranks meet before anything is ready
  CHECK(text(pods.service["spec"]["selector"]["job-name"]) == text(pods.job["metadata"]["name"]));
  const auto given = pods.variables(0);
  CHECK(given.at("NODES") == text(pods.job["spec"]["completions"]));
  CHECK(given.at("GPUS") == text(pods.container["resources"]["limits"]["nvidia.com/gpu"]));
  CHECK(given.at("MASTER_ADDR") ==
        fmt::format("{}-0.{}", text(pods.job["metadata"]["name"]), text(pods.service["metadata"]["name"])));
  std::vector<std::string> mounted, volumes, command;
  for (const YAML::Node& m : pods.container["volumeMounts"]) mounted.push_back(text(m["name"]));
  for (const YAML::Node& v : pods.spec["volumes"]) volumes.push_back(text(v["name"]));
  for (const YAML::Node& word : pods.container["command"]) command.push_back(text(word));
  CHECK(mounted == volumes);
  const auto out = std::ranges::find(command, "--out");
  REQUIRE((out != command.end() && std::next(out) != command.end()));
  CHECK(std::next(out)->starts_with(text(pods.container["volumeMounts"][0]["mountPath"]) + "/"));

  // What the image holds: launch_node, and a hotbunk whose files and GPU are these. The name of pod 0 is known a little
  // later than the pods, and before that no rank can listen there.
  const Folder folder;
  const std::string root = folder.root.string();
  fs::create_directories(folder.root / "bin");
  fs::create_directories(folder.root / "scenarios");
  fs::create_directories(folder.root / "runs");
  REQUIRE(write_file_atomic(folder.root / "scenarios/run.yaml", tiny_job_text));
  fs::copy(fs::path(source_folder) / "scripts/launch_node", folder.root / "bin/launch_node");
  write_program(folder.root / "bin/getent", fmt::format(R"sh(#!/bin/sh
[ "$1 $2" = "ahosts 127.0.0.1" ] || exit 1
asked={}/asked.$NODE_RANK
echo x >> "$asked"
[ "$(wc -l < "$asked")" -ge 2 ] || exit 2
touch "$asked.known"
)sh",
                                                        root));
  write_program(folder.root / "bin/hotbunk", fmt::format(R"(#!/usr/bin/env bash
[ -e {0}/asked.$NODE_RANK.known ] || {{ echo "the name of pod 0 is not known" >&2; exit 9; }}
arguments=()
for a in "$@"; do
  case "$a" in
    /scenarios/* | /runs/*) a="{0}$a" ;;
    cuda) a=cuda-fake ;;
  esac
  arguments+=("$a")
done
exec {1} "${{arguments[@]}}" $MORE
)",
                                                         root, program_file));
  const ReservedPort port, next_port;
  const auto pod = [&](int index, int at, const std::string& more, const std::string& meanwhile) {
    auto variables = pods.variables(index);
    variables["GPUS"] = "1", variables["MASTER_ADDR"] = "127.0.0.1", variables["MASTER_PORT"] = std::to_string(at);
    variables["MORE"] = more;
    std::string line = fmt::format("{{ env -i PATH='{}/bin:/usr/bin:/bin'", root);
    for (const auto& [name, value] : variables) line += fmt::format(" {}='{}'", name, value);
    line += fmt::format(" '{}' & pod=$!; {} wait $pod; }}", fmt::join(command, "' '"), meanwhile);
    return folder.command(line, fmt::format("pod{}.{}", index, at));
  };
  const auto both = [&](int at, const std::string& more, const std::string& meanwhile) {
    auto first = std::async(std::launch::async, [&] { return pod(0, at, more, meanwhile); });
    const Ended second = pod(1, at, more, meanwhile);
    return std::vector{first.get(), second};
  };
  for (const Ended& e : both(port.number(), "--set steps=2", "")) {
    INFO(e.err);
    CHECK(e.code == 0);
  }
  const Ended threads =
      folder.run("threads", fmt::format("{}/scenarios/run.yaml --backend cuda-fake --set steps=2", root));
  REQUIRE(threads.code == 0);
  const std::string weights = "checkpoints/final/model.safetensors";
  CHECK(read_file(folder.root / "runs/run" / weights).value_or("none") ==
        read_file(folder.root / "threads" / weights).value_or(""));
  CHECK(folder.lines("runs/run", "lengths.jsonl") == folder.lines("threads", "lengths.jsonl"));

  // A pod that is deleted gets SIGTERM, and ends well before its grace is over.
  const std::string log = root + "/runs/run/metrics.jsonl";
  for (const Ended& e :
       both(next_port.number(), "--overwrite --set steps=100000",
            fmt::format("until grep -q '\"step\": *3' {} || ! kill -0 $pod; do sleep 0.1; done; kill -TERM "
                        "$pod;",
                        log))) {
    INFO(e.err);
    CHECK(e.code == 0);
    CHECK(e.seconds < pods.spec["terminationGracePeriodSeconds"].as<double>());
  }
  CHECK(folder.lines("runs/run", "metrics.jsonl").size() >= 3);
  CHECK(fs::exists(folder.root / "runs/run" / weights));
}
