// What the subcommands share: options, exit codes, and jobs.
#pragma once
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "cli/command_line.h"
#include "cli/output.h"
#include "exec/lengths.h"
#include "graph/plan.h"
#include "planner/answers/context_exchange.h"
#include "planner/cost/hardware.h"
#include "spec/scenario.h"
#include "trace/static_memory.h"
#include "trace/trace.h"

namespace hotbunk {

enum ExitCode : int { exit_done = 0, exit_no = 1, exit_bad_input = 2, exit_runtime = 3 };

/// Adds one subcommand. One file per subcommand.
void add_plan(CommandLine&);
void add_simulate(CommandLine&);
void add_run(CommandLine&);
void add_report(CommandLine&);
void add_compare(CommandLine&);
void add_calibrate(CommandLine&);
void add_doctor(CommandLine&);
void add_logprobs(CommandLine&);
void add_generate(CommandLine&);
void add_explain(CommandLine&);
void add_sweep(CommandLine&);
void add_layout(CommandLine&);
void add_validate(CommandLine&);
void add_import(CommandLine&);
void add_export(CommandLine&);
void add_lint(CommandLine&);
void add_solve(CommandLine&);

/// Options of every command that takes a scenario.
struct ScenarioOptions {
  std::string path;
  std::vector<std::string> sets;
  bool json = false;
};
void add_scenario_options(const Command&, ScenarioOptions&);

/// The scenario on another command line: its path and its --set.
std::string again(const ScenarioOptions&);
/// "Next: hotbunk COMMAND" with that scenario, unless it came from standard input and is gone, or under --json.
void say_next(const char* command, const ScenarioOptions&, std::string_view flags = "");

/// The same behind an answer that it does not fit: with --set of what cures it.
void say_cure(const char* command, const ScenarioOptions&, const std::vector<std::string>& flags);

/// On stderr, where the scenario has disturbances: `what` is without them, as only `simulate` plays them.
void note_undisturbed(const Scenario&, const char* what);
/// Says which numbers the scenario leaves open and what they are here, and what was chosen by cost; nothing where there
/// are none.
void note_auto(const Scenario&, const std::optional<ExchangeChoice>& = {});

/// load_scenario(), and in the scenario what it leaves to cost (train.context_exchange), so that all commands mean one.
struct ChosenScenario {
  Scenario scenario;
  std::optional<ExchangeChoice> exchange;
};
ChosenScenario with_choices(Scenario);
Result<ChosenScenario> load_chosen(const ScenarioOptions&);

/// E251 unless the scenario's devices are this machine's CPU, or the user agrees to run it here all the same; the help
/// begins with how to.
Status on_this_machine(const Scenario&, bool agreed, std::string_view to_agree = "");
/// E426 where the model is named as on the Hugging Face hub: whoever does so means its weights.
Status weights_are_here(const Scenario&);

/// Threads of a rank: from 1 to a few times the cores, far from where a team of threads breaks the stack or the
/// process.
ValueRule thread_count();

/// E603 for what stopped a run.
Diagnostic stopped(const std::string& why);

/// E103 where the folder of a file to be written does not exist: a slip in a path makes no folders.
Status folder_of_exists(const std::filesystem::path& file);

/// Loads and lowers; prints what is wrong. On failure `code` holds the exit code.
struct Job {
  Scenario scenario;
  Plan plan;
  std::string hash;
  std::optional<ExchangeChoice> exchange = {};  // chosen by cost for it
};
/// Lowered where it executes, else as priced blocks. E250, E263, E301 and what lower() says.
Result<Job> lowered_or_priced(Scenario);
std::optional<Job> load_job(const ScenarioOptions&, int& code);
/// The same for a simulation: what is not lowered op by op is played as priced blocks (planner/priced). The scenario is
/// then the one that is played.
std::optional<Job> load_simulated_job(const ScenarioOptions&, int& code);
std::optional<Job> simulated_job(Scenario, int& code);
/// The same of a scenario that is loaded.
std::optional<Job> lower_job(Scenario, int& code);

/// E301 with the largest tensors and what to change, when the plan does not fit.
std::optional<Diagnostic> fit_error(const Job&);
std::optional<Diagnostic> fit_error(const Job&, const FitReport&);

/// The iterations that one process went through: not all of the scenario's when it resumed, or was asked to stop.
struct StepsWalked {
  std::int32_t first = 1, last = 1;
  bool stopped = false;            // early: with a checkpoint in the last
  std::string bf16_products{};     // what formed them on the process's CPU (kernels::text_of); "": on no CPU
  std::string instruction_sets{};  // that computed (Arithmetic)
  std::string run_hash{};          // of all that its bits depend on (run_facts.h)
};

/// Simulates all ranks; lengths drawn, or those that a run recorded. `enforce_capacity` off shows by how much a plan
/// does not fit.
struct SimulateOptions {
  std::optional<StepLengths> lengths;
  std::int32_t span_steps = 2;          // from the first iteration on
  std::optional<StepsWalked> walked{};  // default: all of the scenario's
  bool enforce_capacity = true;
  std::vector<Rank> by_op{};  // ranks that are played op by op
  bool every_op = false;      // all are, as a run is measured: what is compared with one counts ops
  bool disturbed = false;     // with the scenario's disturbances; a prediction of a run is without
  bool shows_progress = true;
  std::int64_t seed_offset = 0;  // added to the scenario's seed and the jitter's: another draw
};
Result<Trace> simulate_job(const Job&, const Hardware&, const SimulateOptions&);
/// The profile that prices this scenario's ops.
Result<Hardware> hardware_of(const Scenario&);

/// Files of a run folder (DESIGN: contracts).
struct RunFolder {
  std::filesystem::path root;
  std::filesystem::path plan() const { return root / "plan.json"; }
  std::filesystem::path scenario() const { return root / "scenario.yaml"; }
  std::filesystem::path trace() const { return root / "trace.json"; }
  std::filesystem::path simulated_trace() const { return root / "simulated.json"; }
  std::filesystem::path summary() const { return root / "summary.json"; }
  std::filesystem::path metrics() const { return root / "metrics.jsonl"; }
  std::filesystem::path lengths() const { return root / "lengths.jsonl"; }
  std::filesystem::path sync_hashes() const { return root / "sync_hashes.jsonl"; }
  std::filesystem::path samples() const { return root / "samples.jsonl"; }
  std::filesystem::path report() const { return root / "report.html"; }
  std::filesystem::path walked() const { return root / "run.json"; }
  std::filesystem::path chrome_trace() const { return root / "perfetto.json"; }
  std::filesystem::path checkpoints() const { return root / "checkpoints"; }
};
/// What a run or a simulation leaves in its folder.
struct RunRecord {
  const Trace& trace;
  const Trace* predicted = nullptr;  // null: no simulated.json
  std::string calibration;
  std::optional<StepsWalked> walked{};  // none: no run.json
  /// Responses by length, where the folder's lengths.jsonl is not of all steps.
  std::optional<LengthCounts> responses{};
  /// What summary.json says of the run beside what follows from plan and trace (facts_of_run).
  const nlohmann::ordered_json* facts = nullptr;
};
/// Of a summary.json, what only the run knew: which bodies ever ran on hardware, who formed products. An empty object
/// where there is none, or where no such file is.
nlohmann::ordered_json facts_of_run(const RunFolder&);
/// The lengths that a run recorded of these steps (default: all of the scenario's). E101, E120, E121.
Result<StepLengths> lengths_of(const RunFolder&, Scenario, const std::optional<StepsWalked>&);
/// Writes everything but checkpoints and the files of lines (metrics, lengths, hashes, samples), which the report reads
/// where they are. E633 when files could not be written: the others are, each of them whole.
Status write_run_folder(const RunFolder&, const Job&, const RunRecord&);

/// A run folder read back, its files checked to be of one run.
struct LoadedRun {
  Job job;
  Trace trace;
  std::optional<Trace> predicted;
  std::optional<StepsWalked> walked;  // of a measured run
};
/// E127 when it is none, E134 when its run did not end; E115 when its files are of different runs or plans.
Result<LoadedRun> read_run_folder(const RunFolder&);

}  // namespace hotbunk
