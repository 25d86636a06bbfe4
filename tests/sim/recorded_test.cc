// P6 where it cannot flake: a calibration and a run of the demo scenario, recorded once on one machine
// (scripts/record_phase_times.py), and what the simulator makes of that profile and those lengths today.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "planner/cost/cost_model.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/loader.h"
#include "tests/blocks.h"
#include "tests/json.h"
#include "tests/paths.h"

using namespace hotbunk;

namespace {

const std::filesystem::path folder = std::filesystem::path(source_folder) / "tests/sim/recorded";

struct Record {
  Scenario scenario;
  Plan plan = test::empty_plan();
  Hardware hardware;
  std::vector<SampleLengths> lengths;
  std::map<std::string, double> seconds;  // by phase, sum over steps of the mean over ranks
};

Record read_record() {
  const auto measured = json_from<nlohmann::json>(read_file(folder / "measured.json").value());
  const std::string steps = "steps=" + std::to_string(measured["steps"].get<int>());
  Record r;
  r.scenario = load_scenario(folder / "scenario.yaml", {steps}).value();
  r.plan = lower(r.scenario).value();
  const auto hardware = read_hardware(folder / "profile.yaml", r.scenario.cluster);
  INFO((hardware ? "" : render(hardware.error())) << "Record anew: scripts/record_phase_times.py");
  REQUIRE(hardware);
  r.hardware = *hardware;
  r.lengths = read_lengths(folder / "lengths.jsonl").value();
  for (const auto& [name, row] : measured["phases"].items())
    r.seconds[name] = row["seconds"].get<double>() * row["times"].get<double>();
  return r;
}

std::map<std::string, double> simulated_seconds(const Record& r, const Hardware& hardware) {
  auto driver = LengthDriver::create(r.plan, r.scenario, r.lengths);
  REQUIRE(driver);
  const CostModel model(hardware, r.scenario.cluster);
  const ModelCost cost(model);
  SimBackend backend(r.scenario.cluster, cost);
  RunOptions run{.steps = static_cast<std::int32_t>(r.scenario.steps), .local_ranks = {}};
  for (Rank rank = 0; rank < r.plan.num_ranks(); ++rank) run.local_ranks.push_back(rank);
  const auto trace = execute(r.plan, backend, **driver, run);
  REQUIRE(trace);
  std::map<std::string, double> out;
  for (const PhaseSpan& p : trace->phases)
    out[r.plan.phases[static_cast<std::size_t>(p.phase)].name] +=
        1e-9 * static_cast<double>(p.end_ns - p.start_ns) / r.plan.num_ranks();
  return out;
}

struct Errors {
  double mean = 0.0;   // of |error| by phase, weighted by measured time, as `compare` does
  double total = 0.0;  // signed
};

/// Phases of an iteration: what runs once at either end reads and writes files.
Errors errors_of(const Record& r, const std::map<std::string, double>& simulated) {
  double wrong = 0.0, measured = 0.0, predicted = 0.0;
  for (const PhaseInfo& phase : r.plan.phases) {
    if (phase.when != When::iteration) continue;
    const double x = simulated.at(phase.name), y = r.seconds.at(phase.name);
    wrong += std::abs(x - y), measured += y, predicted += x;
  }
  return {wrong / measured, (predicted - measured) / measured};
}

double error_of(const Record& r, const std::map<std::string, double>& simulated, const std::string& phase) {
  return simulated.at(phase) / r.seconds.at(phase) - 1.0;
}

}  // namespace

TEST_CASE("phase times of a recorded run are predicted from its calibration") {
  const Record r = read_record();
  const auto simulated = simulated_seconds(r, r.hardware);
  const Errors errors = errors_of(r, simulated);
  CHECK(errors.mean < 0.12);
  CHECK(std::abs(errors.total) < 0.06);
  for (const char* compute : {"rollout", "reference", "old_logprobs", "train"}) {
    INFO(compute);
    CHECK(std::abs(error_of(r, simulated, compute)) < 0.20);
  }
  // Phases that are mostly hand-overs, barriers, and ranks waiting for a core.
  for (const char* waiting : {"sync", "exchange", "sleep_optimizer", "sleep_train", "wake_train"}) {
    INFO(waiting);
    // The record is of a plan that mapped 2.6 % less: wake_train, which maps, is 36 % off, 30 % before.
    CHECK(std::abs(error_of(r, simulated, waiting)) < 0.40);
  }
}

TEST_CASE("without the threads' model the recorded run is not predicted: each part of it is needed") {
  const Record r = read_record();
  const auto with = simulated_seconds(r, r.hardware);
  Hardware no_cores = r.hardware;  // ranks never wait for a core, hosts cost nothing
  no_cores.cores.value = 0;
  const auto free = simulated_seconds(r, no_cores);
  CHECK(errors_of(r, free).mean > 0.30);
  CHECK(error_of(r, free, "exchange") < -0.5);
  CHECK(error_of(r, free, "sync") < -0.4);
  Hardware no_hand_over = r.hardware;
  no_hand_over.wake.value = no_hand_over.thread_switch.value = 0;
  const auto instant = simulated_seconds(r, no_hand_over);
  CHECK(instant.at("sync") < 0.92 * with.at("sync"));
  Hardware no_first_use = r.hardware;
  no_first_use.first_use.value = 0;
  CHECK(simulated_seconds(r, no_first_use).at("train") < 0.97 * with.at("train"));
}
