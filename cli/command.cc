#include "cli/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/shell_quoted.h"
#include "cli/progress.h"
#include "cli/resume.h"
#include "cli/run_facts.h"
#include "cli/run_folder.h"
#include "exec/length_driver.h"
#include "graph/plan_json.h"
#include "lowering/lower.h"
#include "planner/answers/remedies.h"
#include "planner/priced/priced_plan.h"
#include "reports/chrome_trace.h"
#include "reports/html.h"
#include "reports/shown_samples.h"
#include "sim/disturbed_cost.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/auto_ranks.h"
#include "spec/catalog.h"
#include "spec/json_read.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "trace/kept_steps.h"
#include "trace/summary.h"
#include "trace/trace_json.h"

namespace hotbunk {

void add_scenario_options(const Command& command, ScenarioOptions& o) {
  command.option("scenario", o.path, "scenario file (YAML); -: standard input").required();
  command.option("--set", o.sets, "override a scenario key: a.b.c=value (repeatable)").one_each_time();
  command.flag("--json", o.json, "one JSON document on stdout, nothing else there");
}

std::string again(const ScenarioOptions& o) {
  std::string out = shell_quoted(o.path);
  for (const std::string& set : o.sets) out += " --set " + shell_quoted(set);
  return out;
}

void say_next(const char* command, const ScenarioOptions& o, std::string_view flags) {
  if (o.json || o.path == "-") return;
  say_next(fmt::format("{} {}{}{}", command, again(o), flags.empty() ? "" : " ", flags));
}

void say_cure(const char* command, const ScenarioOptions& o, const std::vector<std::string>& flags) {
  ScenarioOptions cured = o;
  cured.sets.insert(cured.sets.end(), flags.begin(), flags.end());
  say_next(command, cured);
}

void note_auto(const Scenario& s, const std::optional<ExchangeChoice>& exchange) {
  if (const std::string chosen = auto_choices(s); !chosen.empty())
    fmt::print(stderr, "note: auto: {}, the least that is legal; `plan` ranks what is faster\n", chosen);
  if (exchange) fmt::print(stderr, "note: auto: train.context_exchange {}\n", render(*exchange));
}

ChosenScenario with_choices(Scenario s) {
  const auto exchange = choose_context_exchange(s, catalog_root());
  if (exchange) s.train.context_exchange = exchange->chosen;
  return {std::move(s), exchange};
}

Result<ChosenScenario> load_chosen(const ScenarioOptions& o) {
  auto scenario = load_scenario(o.path, o.sets);
  if (!scenario) return fail(scenario.error());
  return with_choices(std::move(*scenario));
}

void note_undisturbed(const Scenario& s, const char* what) {
  if (!s.disturbances.none())
    fmt::print(stderr, "note: disturbances are played by `simulate` only: {} is without them\n", what);
}

Status on_this_machine(const Scenario& s, bool agreed, std::string_view to_agree) {
  const ClusterSpec& c = s.cluster;
  if (agreed || c.gpu.is_cpu) return {};
  return fail(Diagnostic{
      .code = "E251",
      .message = fmt::format("the scenario's device is {}, and this program executes on CPU ranks", c.gpu.name),
      .where = {},
      .notes = {fmt::format("its {} ranks would share the {} cores of this machine", c.ranks(), local_machine().cores)},
      .help = fmt::format("{}to describe this machine set cluster.gpu to local-cpu", to_agree)});
}

Status weights_are_here(const Scenario& s) {
  if (s.model.hub_name.empty() || !s.model.weights_path.empty()) return {};
  return fail(Diagnostic{
      .code = "E426",
      .message = fmt::format("model {} names weights that are not here", s.model.hub_name),
      .where = {},
      .notes = {"plans and simulations need its shapes alone, which the catalogue has; a run starts from weights"},
      .help = fmt::format("fetch its folder (hf download {}) and name that, or model: {} for random weights",
                          s.model.hub_name, s.model.name)});
}

Status folder_of_exists(const std::filesystem::path& file) {
  const std::filesystem::path folder = file.parent_path();
  std::error_code ignored;
  if (folder.empty() || std::filesystem::is_directory(folder, ignored)) return {};
  return fail(Diagnostic{
      .code = "E103",
      .message = fmt::format("there is no folder {} to write {} in", folder.string(), file.filename().string()),
      .where = {},
      .notes = {},
      .help = "create it first"});
}

ValueRule thread_count() {
  constexpr std::int64_t per_core = 16;  // more than any use of oversubscription, less than a thread's stack can hold
  const std::int64_t cores = local_machine().cores;
  return {fmt::format("INT in [1 - {}]", per_core * cores), [=](const std::string& text) -> std::string {
            if (const auto value = whole_number(text); value && *value >= 1 && *value <= per_core * cores) return {};
            return fmt::format("{} is not from 1 to {} ({} cores x {})", text, per_core * cores, cores, per_core);
          }};
}

Diagnostic stopped(const std::string& why) {
  return {.code = "E603",
          .message = why,
          .where = {},
          .notes = {},
          .help =
              "when a rank is named, what it said itself comes first; `hotbunk doctor` tries memory, sockets and "
              "threads of this machine"};
}

namespace {

std::optional<Job> load_with(const ScenarioOptions& o, int& code, std::optional<Job> (*plan)(Scenario, int&)) {
  auto chosen = load_chosen(o);
  if (!chosen) {
    code = report_errors(chosen.error());
    return std::nullopt;
  }
  std::optional<Job> job = plan(std::move(chosen->scenario), code);
  if (job) job->exchange = chosen->exchange;
  return job;
}

}  // namespace

std::optional<Job> load_job(const ScenarioOptions& o, int& code) { return load_with(o, code, lower_job); }

std::optional<Job> load_simulated_job(const ScenarioOptions& o, int& code) { return load_with(o, code, simulated_job); }

namespace {

std::optional<Job> or_report(Result<Job> job, int& code) {
  if (job) return std::move(*job);
  code = report_errors(job.error());
  return std::nullopt;
}

Result<Job> lowered(Scenario scenario) {
  auto plan = lower(scenario);
  if (!plan) return fail(plan.error());
  Job job{std::move(scenario), std::move(*plan), {}};
  job.hash = plan_hash(job.plan);
  return job;
}

}  // namespace

Result<Job> lowered_or_priced(Scenario scenario) {
  if (unsupported_to_execute(scenario).empty()) return lowered(std::move(scenario));
  const auto pricer = ScenarioPricer::make(scenario, catalog_root());
  if (!pricer) return fail(pricer.error());
  auto priced = priced_job(**pricer);
  if (!priced) return fail(priced.error());
  Job job{std::move(priced->scenario), std::move(priced->plan), {}};
  job.hash = plan_hash(job.plan);
  return job;
}

std::optional<Job> simulated_job(Scenario scenario, int& code) {
  return or_report(lowered_or_priced(std::move(scenario)), code);
}

std::optional<Job> lower_job(Scenario scenario, int& code) { return or_report(lowered(std::move(scenario)), code); }

std::optional<Diagnostic> fit_error(const Job& job) { return fit_error(job, check_fit(job.plan)); }

std::optional<Diagnostic> fit_error(const Job& job, const FitReport& fit) {
  if (fit.fits) return std::nullopt;
  const std::string phase = fit.phase >= 0 ? job.plan.phases[static_cast<std::size_t>(fit.phase)].name : "?";
  Diagnostic d{
      .code = "E301",
      .message = fmt::format("the plan does not fit: rank {} needs {} of {} {} memory in phase {}", fit.worst_rank,
                             format_bytes(static_cast<double>(fit.mapped_peak_bytes + fit.overhead_bytes)),
                             format_bytes(static_cast<double>(fit.capacity_bytes)), name_of(fit.space), phase),
      .where = {},
      .notes = {},
      .help = {}};
  const auto live = live_at_peak(job.plan, fit.worst_rank, fit.phase, fit.space);
  std::string largest;
  for (std::size_t i = 0; i < std::min<std::size_t>(4, live.size()); ++i)
    largest += fmt::format("{}{} {} ({})", i ? ", " : "largest at the peak: ", live[i].name,
                           format_bytes(static_cast<double>(live[i].bytes)), name_of(live[i].category));
  if (!largest.empty()) d.notes.push_back(largest);
  d.notes.push_back(fmt::format("short by {}", format_bytes(static_cast<double>(
                                                   fit.mapped_peak_bytes + fit.overhead_bytes - fit.capacity_bytes))));
  d.help = remedy_text(job.scenario, catalog_root());
  return d;
}

Result<Hardware> hardware_of(const Scenario& s) { return hardware_for(s, catalog_root()); }

namespace {

/// About how many spans a run folder of some 20 MB has room for, beside what it says of each rank; one where many stays
/// have many items has somewhat more. Measured of the 7B on 8 to 16,384 GPUs, over perfetto.json, trace.json,
/// report.html and summary.json together.
std::int64_t room_of_folder(std::int64_t ranks, std::int64_t played, std::int64_t steps) {
  constexpr std::int64_t folder_bytes = 24'000'000;
  constexpr std::int64_t span_bytes = 700;      // with the memory events that come with it
  constexpr std::int64_t rank_bytes = 450;      // its number in rows of traffic
  constexpr std::int64_t played_bytes = 2'000;  // its peaks and totals
  constexpr std::int64_t stay_bytes = 2'500;    // what it does in a step that has rows (trace/kept_steps.h)
  constexpr std::int64_t least = 4'000;
  const std::int64_t rows = played * std::min<std::int64_t>(steps, KeptSteps::of(played).most);
  return std::max(least, (folder_bytes - ranks * rank_bytes - played * played_bytes - rows * stay_bytes) / span_bytes);
}

}  // namespace

Result<Trace> simulate_job(const Job& job, const Hardware& hardware, const SimulateOptions& options) {
  Scenario scenario = job.scenario;
  const StepsWalked walked =
      options.walked.value_or(StepsWalked{.last = static_cast<std::int32_t>(job.scenario.steps)});
  scenario.steps = walked.last;
  scenario.seed += options.seed_offset, scenario.disturbances.jitter.seed += options.seed_offset;
  auto driver = options.lengths ? LengthDriver::create(job.plan, scenario, *options.lengths)
                                : LengthDriver::create(job.plan, scenario);
  if (!driver) return tl::unexpected(driver.error());
  if (walked.stopped) (*driver)->end_after(walked.last);
  const CostModel model(hardware, job.scenario.cluster);
  const ModelCost undisturbed(model);
  std::optional<DisturbedCost> disturbed;
  if (options.disturbed && !job.scenario.disturbances.none())
    disturbed.emplace(undisturbed, scenario.disturbances, job.scenario.cluster);
  const OpCost& cost = disturbed ? static_cast<const OpCost&>(*disturbed) : undisturbed;
  SimOptions sim;
  sim.enforce_capacity = options.enforce_capacity;
  // Threads that share cores take turns op by op, and so do ranks that share a device.
  const bool by_call = !options.every_op && cost.threads().cores == 0 && job.scenario.cluster.ranks_per_device == 1;
  if (by_call) {
    sim.granularity = Granularity::calls;
    sim.links = &model;
    if (disturbed) sim.slow = rank_factors(scenario.disturbances, job.scenario.cluster);
    sim.by_op = sim.timeline.in_full = options.by_op;
    if (options.by_op.empty() && !cost.jitters()) (*driver)->take_steps_together();
    std::vector<std::int32_t> classes = (*driver)->rank_classes(walked.first, walked.last);
    for (std::int32_t alone = -1; const Rank r : options.by_op) classes[static_cast<std::size_t>(r)] = alone--;
    // Who shares a NUMA domain's memory, a node's links or a pod's must be alike too.
    const std::int64_t node = job.scenario.cluster.gpus_per_node;
    std::vector<std::int64_t> neighbours = {node / job.scenario.cluster.even_numa_domains(), node};
    if (job.scenario.cluster.pod_nodes > 0) neighbours.push_back(node * job.scenario.cluster.pod_nodes);
    sim.classes = RankClasses::fold(job.plan, cost, classes, neighbours);
    sim.timeline.room = room_of_folder(job.plan.num_ranks(), std::ssize(sim.classes->players()), walked.last);
  }
  sim.timeline.last_step = std::min(walked.first - 1 + options.span_steps, walked.last);
  RunOptions run;
  run.first_step = walked.first, run.steps = walked.last;
  SimBackend backend(job.scenario.cluster, cost, sim);
  run.local_ranks = sim.classes.value_or(RankClasses::unfolded(job.plan.num_ranks())).players();
  ProgressLine progress;
  if (options.shows_progress)
    run.on_phase = [&](std::int32_t step, std::int16_t phase) {
      progress.show([&] {
        return fmt::format("simulating step {}/{}, {}", std::clamp(step, run.first_step, run.steps), run.steps,
                           job.plan.phases[static_cast<std::size_t>(phase)].name);
      });
    };
  return execute(job.plan, backend, **driver, run);
}

namespace {

/// Files of a run folder, each written whole or not at all; one that cannot be written stops no other.
class Outputs {
 public:
  void write(const std::filesystem::path& file, const std::string& text) { note(file, write_file_atomic(file, text)); }
  void note(const std::filesystem::path& file, const Status& status) {
    const std::string name = file.filename().string();
    if (status) written_.push_back(name);
    else failed_.push_back(fmt::format("not written: {}: {}", name, status.error().front().message));
  }
  /// E633: the work is done, but its files are not all there.
  Status status(const RunFolder& folder) && {
    if (failed_.empty()) return {};
    if (!written_.empty()) failed_.push_back(fmt::format("written: {}", fmt::join(written_, ", ")));
    return fail(Diagnostic{.code = "E633",
                           .message = "not all files of the run folder could be written",
                           .where = {folder.root.string()},
                           .notes = std::move(failed_),
                           .help = "make room; where plan.json, scenario.yaml and trace.json are written, `hotbunk "
                                   "report` writes the others again"});
  }

 private:
  std::vector<std::string> written_, failed_;
};

std::string walked_json(const StepsWalked& walked) {
  const nlohmann::ordered_json json = {{"schema", "hotbunk.run/1"},
                                       {"first_step", walked.first},
                                       {"last_step", walked.last},
                                       {"stopped", walked.stopped},
                                       {"bf16_products", walked.bf16_products},
                                       {"instruction_sets", walked.instruction_sets},
                                       {"run_hash", walked.run_hash}};
  return json_text(json, 1) + "\n";
}

/// E113 when run.json is not what `run` writes.
Result<StepsWalked> read_walked(const std::filesystem::path& file, const Scenario& s) {
  const auto text = read_file(file, 1 << 16);
  if (!text) return tl::unexpected(text.error());
  const auto json = parse_json(*text, file.string());
  if (!json) return tl::unexpected(json.error());
  const auto number = [&](const char* key) {
    return json->is_object() && json->contains(key) && (*json)[key].is_number_integer()
               ? (*json)[key].get<std::int64_t>()
               : -1;
  };
  const std::int64_t first = number("first_step"), last = number("last_step");
  const bool stopped = json->is_object() && json->contains("stopped") && (*json)["stopped"] == true;
  const auto words = [&](const char* key) {
    return json->is_object() && json->contains(key) && (*json)[key].is_string() ? (*json)[key].get<std::string>() : "";
  };
  // Without a step of its own: a run that was killed behind its last one, and whose end came later.
  if (first < 1 || last < first - 1 || last > s.steps)
    return fail(Diagnostic{.code = "E113",
                           .message = fmt::format("steps {} to {} are none of a run of {}", first, last, s.steps),
                           .where = {file.string()},
                           .notes = {},
                           .help = "the file was changed, or is of another run"});
  return StepsWalked{static_cast<std::int32_t>(first), static_cast<std::int32_t>(last), stopped,
                     words("bf16_products"),           words("instruction_sets"),       words("run_hash")};
}

}  // namespace

Result<StepLengths> lengths_of(const RunFolder& folder, Scenario scenario, const std::optional<StepsWalked>& walked) {
  if (walked) scenario.steps = walked->last;
  return recorded_lengths(folder.lengths(), scenario, walked ? walked->first : 1);
}

nlohmann::ordered_json facts_of_run(const RunFolder& folder) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  const auto text = read_file(folder.summary());
  const auto all = text ? json_or_discarded<nlohmann::ordered_json>(*text) : nlohmann::ordered_json();
  for (const char* key :
       {"run_hash", "hardware_evidence", "matrix_products", "attention_backward", "library_choices", "bodies"})
    if (all.is_object() && all.contains(key)) out[key] = all[key];
  return out;
}

Status write_run_folder(const RunFolder& folder, const Job& job, const RunRecord& record) {
  Outputs outputs;
  // What cannot be made again comes first, and what is small: the disk may be full soon.
  auto summary = summarize(job.plan, job.scenario, record.trace);
  if (record.facts != nullptr) summary.update(*record.facts);
  outputs.write(folder.summary(), json_text(summary, 1) + "\n");
  outputs.write(folder.scenario(), resolved_yaml(with_absolute_paths(job.scenario)));
  if (record.walked) outputs.write(folder.walked(), walked_json(*record.walked));
  outputs.write(folder.plan(), plan_to_json(job.plan, scenario_facts(job.scenario)));
  outputs.write(folder.trace(), trace_to_json(record.trace, job.hash));
  if (record.predicted) outputs.write(folder.simulated_trace(), trace_to_json(*record.predicted, job.hash));
  std::error_code ignored;
  auto responses = record.responses                                     ? Result<LengthCounts>(*record.responses)
                   : std::filesystem::exists(folder.lengths(), ignored) ? read_length_counts(folder.lengths())
                                                                        : Result<LengthCounts>();
  if (!responses) outputs.note(folder.report(), fail(responses.error()));
  auto samples = read_shown_samples(folder.samples());
  if (!samples) outputs.note(folder.report(), fail(samples.error()));
  if (responses && samples)
    outputs.write(folder.report(), html_report({.plan = job.plan,
                                                .scenario = job.scenario,
                                                .trace = record.trace,
                                                .predicted = record.predicted,
                                                .calibration = record.calibration,
                                                .responses = std::move(*responses),
                                                .samples = std::move(*samples),
                                                .origin = origin_of(folder)}));
  outputs.write(folder.chrome_trace(), chrome_trace(job.plan, record.trace));
  return std::move(outputs).status(folder);
}

namespace {

/// E115: a file of the folder that is of another plan than plan.json.
Diagnostic another_plan(const std::filesystem::path& file, const std::string& its, const RunFolder& folder,
                        const std::string& hash) {
  return {.code = "E115",
          .message = "the run folder's files are not of one plan",
          .where = {file.string()},
          .notes = {fmt::format("{} gives plan {}, {} is plan {}", file.filename().string(), its,
                                folder.plan().filename().string(), hash)},
          .help = "a file was changed, comes from another run, or was written by another version: run it again"};
}

Result<Trace> read_trace_of(const RunFolder& folder, const std::filesystem::path& file, const Job& job) {
  auto text = read_file(file, std::int64_t{8} << 30);
  if (!text) return tl::unexpected(text.error());
  auto read = trace_from_json(*text, file.string());
  if (!read) return tl::unexpected(read.error());
  if (read->plan_hash != job.hash) return fail(another_plan(file, read->plan_hash, folder, job.hash));
  if (auto s = trace_fits_plan(read->trace, job.plan, file.string()); !s) return tl::unexpected(s.error());
  return std::move(read->trace);
}

}  // namespace

Result<LoadedRun> read_run_folder(const RunFolder& folder) {
  if (auto s = check_whole_run(folder); !s) return tl::unexpected(s.error());
  std::error_code ignored;
  auto scenario = load_scenario(folder.scenario());
  if (!scenario) return tl::unexpected(scenario.error());
  auto plan_text = read_file(folder.plan());
  if (!plan_text) return tl::unexpected(plan_text.error());
  auto plan = plan_from_json(*plan_text, folder.plan().string());
  if (!plan) return tl::unexpected(plan.error());
  LoadedRun run{.job = {std::move(*scenario), std::move(*plan), {}}, .trace = {}, .predicted = {}, .walked = {}};
  run.job.hash = plan_hash(run.job.plan);
  const auto again = lowered_or_priced(run.job.scenario);
  if (!again) return tl::unexpected(again.error());
  if (again->hash != run.job.hash) return fail(another_plan(folder.scenario(), again->hash, folder, run.job.hash));
  auto trace = read_trace_of(folder, folder.trace(), run.job);
  if (!trace) return tl::unexpected(trace.error());
  run.trace = std::move(*trace);
  if (std::filesystem::exists(folder.simulated_trace(), ignored)) {
    auto predicted = read_trace_of(folder, folder.simulated_trace(), run.job);
    if (!predicted) return tl::unexpected(predicted.error());
    run.predicted = std::move(*predicted);
  }
  if (std::filesystem::exists(folder.walked(), ignored)) {
    auto walked = read_walked(folder.walked(), run.job.scenario);
    if (!walked) return tl::unexpected(walked.error());
    run.walked = *walked;
  }
  return run;
}

}  // namespace hotbunk
