// `run` has two lives: started by a user it becomes the launcher of local ranks; started with torchrun's, Slurm's or
// MPI's variables (also by itself) it is one rank.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/gather.h"
#include "base/check.h"
#include "base/file.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/run_input.h"
#include "exec/lengths.h"
#include "graph/plan_json.h"
#include "graph/print.h"
#include "rl/sft_driver.h"
#include "spec/catalog.h"
#include "trace/compare.h"
#include "trace/summary.h"
#include "trace/trace_json.h"

namespace hotbunk {
namespace {

struct Options {
  ScenarioOptions scenario;
  std::string out, plan, transport;
  bool no_fit_check = false, check = false, on_cpu = false;
  std::int32_t span_steps = 2;
  std::int32_t threads = 0;
  std::vector<std::string> argv;
};

RunFolder run_folder(const Options& o, const Job& job) { return {o.out.empty() ? "runs/" + job.scenario.name : o.out}; }

/// A saved plan is a promise: what runs must be it.
Status check_drift(const Options& o, const Job& job) {
  if (o.plan.empty()) return {};
  auto text = read_file(o.plan);
  if (!text) return tl::unexpected(text.error());
  auto saved = plan_from_json(*text, o.plan);
  if (!saved) return tl::unexpected(saved.error());
  const std::string hash = plan_hash(*saved);
  if (hash == job.hash) return {};
  std::vector<std::string> notes = {fmt::format("saved {}, now {}", hash, job.hash)};
  std::istringstream differences(diff_plans(*saved, job.plan));
  for (std::string line; notes.size() < 9 && std::getline(differences, line);) notes.push_back(line);
  return fail(
      Diagnostic{.code = "E510",
                 .message = "the scenario no longer gives the saved plan",
                 .where = {o.plan},
                 .notes = std::move(notes),
                 .help = "save a new plan with `hotbunk plan --out`, or run the scenario that it was made from"});
}

/// The ranks must have read the same scenario (files may differ between hosts).
void check_same_plan(World& world, const Job& job) {
  if (world.size() == 1) return;
  if (world.rank() == 0) world.set("plan hash", job.hash);
  const std::string first = world.get("plan hash");
  if (first != job.hash)
    throw RuntimeFailure(fmt::format("rank {} has plan {}, rank 0 has {}: the scenario files differ between hosts",
                                     world.rank(), job.hash, first));
}

/// Once the run's own files are whole: what they replace, and hashes and checkpoints of an earlier, other run in this
/// folder.
void remove_stale(const RunFolder& folder, const Job& job, const TrainingDriver& driver) {
  std::error_code ignored;
  std::filesystem::remove(folder.steps_so_far(), ignored);  // metrics.jsonl says all of it
  if (driver.sync_hashes().empty()) std::filesystem::remove(folder.sync_hashes(), ignored);
  std::vector<std::filesystem::path> stale;
  for (const auto& entry : std::filesystem::directory_iterator(folder.checkpoints(), ignored)) {
    const std::string name = entry.path().filename().string();
    std::int64_t step = 0;
    const char* const end = name.data() + name.size();
    if (!name.starts_with("step_") || std::from_chars(name.data() + 5, end, step).ptr != end) continue;
    const std::int64_t every = job.scenario.checkpoint_every;
    const bool written = every > 0 && step % every == 0 && step <= job.scenario.steps;
    const bool began_there = std::filesystem::equivalent(entry.path(), job.scenario.model.weights_path, ignored);
    if (!written && !began_there) stale.push_back(entry.path());
  }
  for (const auto& path : stale) std::filesystem::remove_all(path, ignored);
}

int finish_rank_0(const Options& o, const Job& job, const RunFolder& folder, const TrainingDriver& driver,
                  std::vector<std::string> parts) {
  std::vector<Trace> traces;
  for (const std::string& text : parts) {
    auto file = trace_from_json(text, "rank's trace");
    if (!file) return report_errors(file.error());
    traces.push_back(std::move(file->trace));
  }
  const Trace measured = merge_traces(traces);
  if (!driver.sync_hashes().empty())
    if (auto s = write_sync_hashes(folder.sync_hashes(), job.scenario.rollout.dtype, driver.sync_hashes()); !s)
      return report_errors(s.error());
  const auto hardware = hardware_of(job.scenario);
  if (!hardware) return report_errors(hardware.error());
  const auto lengths = driver.trained_lengths();
  const auto simulated =
      simulate_job(job, *hardware, {.lengths = lengths, .span_steps = o.span_steps, .enforce_capacity = false});
  if (!simulated) return report_errors(simulated.error());
  const RunRecord record{
      .trace = measured, .predicted = &*simulated, .lengths = lengths, .calibration = hardware->source};
  if (auto s = write_run_folder(folder, job, record); !s) return report_errors(s.error());
  remove_stale(folder, job, driver);
  auto summary = summarize(job.plan, job.scenario, measured);
  const Comparison compared = compare_traces(job.plan, *simulated, measured);
  if (o.scenario.json) {
    summary["equal"] = compared.equal;
    print_document(summary.dump(1));
    if (!compared.equal) fmt::print(stderr, "{}", render_comparison(compared, false));
  } else {
    fmt::print("{}\n{}", render_summary(summary, use_colour()), render_comparison(compared, use_colour()));
    fmt::print("Report: {}\n", printable_line(folder.report().string()));
    std::fflush(stdout);
    say_next("compare " + shell_quoted(folder.root.string()));
  }
  return compared.equal ? exit_done : exit_no;
}

/// The figures of finished steps, on disk while the run goes on: a killed run leaves them, a whole one replaces them by
/// metrics.jsonl. A line reaches the file when its step ends, so `tail -f` follows a run.
class StepLines {
 public:
  explicit StepLines(const std::filesystem::path& path) : file_(path, std::ios::trunc) {}
  void operator()(const StepMetrics& m) {
    nlohmann::ordered_json line = {{"step", m.step}};
    for (const auto& [name, value] : m.values) line[name] = value;
    file_ << line.dump() + '\n' << std::flush;
  }

 private:
  std::ofstream file_;
};

class Progress {
 public:
  explicit Progress(std::int64_t steps) : steps_(steps) {}
  void operator()(const StepMetrics& m) const {
    const auto value = [&](const char* name) {
      const auto it = m.values.find(name);
      return it == m.values.end() ? std::string("-") : fmt::format("{:.4f}", it->second);
    };
    const char* end = isatty(fileno(stderr)) ? "\r" : "\n";
    if (*end == '\r' || m.step == 1 || m.step % 10 == 0 || m.step == steps_)
      std::fprintf(stderr, "step %d/%lld  loss %s  reward %s  grad norm %s   %s", m.step,
                   static_cast<long long>(steps_), value("loss").c_str(), value("reward").c_str(),
                   value("actor/grad_norm").c_str(), end);
    if (*end == '\r' && m.step == steps_) std::fprintf(stderr, "\n");
  }

 private:
  std::int64_t steps_;
};

int run_rank(const Options& o, const Job& job, World& world) {
  const RunFolder folder = run_folder(o, job);
  const bool first = world.rank() == 0;
  check_same_plan(world, job);
  DriverOptions driver_options;
  driver_options.checkpoints = folder.checkpoints();
  if (first) {
    auto lines = std::make_shared<StepLines>(folder.steps_so_far());
    driver_options.on_step = [lines, progress = Progress(job.scenario.steps)](const StepMetrics& m) {
      (*lines)(m);
      progress(m);
    };
  }
  auto driver = make_training_driver(job.plan, job.scenario, driver_options);
  if (!driver) return report_errors(driver.error());
  CpuOptions cpu;
  const auto cores = static_cast<int>(local_machine().cores);
  cpu.compute_threads = o.threads > 0 ? o.threads : std::max(1, cores / std::max(1, world.size()));
  cpu.span_steps = o.span_steps;
  cpu.check_resident = cpu.check_finite = cpu.poison = o.check;
  if (o.transport == "gloo") cpu.transport = Transport::gloo;
  if (o.transport == "shm") cpu.transport = Transport::shm;
  CpuBackend backend(world, **driver, cpu);
  const RunOptions options{.steps = static_cast<std::int32_t>(job.scenario.steps),
                           .local_ranks = {static_cast<Rank>(world.rank())}};
  auto trace = execute(job.plan, backend, **driver, options);
  if (!trace) {
    const Diagnostic& d = trace.error().front();
    // The others learn why before they learn that this rank is gone.
    world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), d.message));
    return report_errors(trace.error());
  }
  const auto parts = gather_strings(world, "results", trace_to_json(*trace, job.hash));
  const int code = first ? finish_rank_0(o, job, folder, **driver, parts) : exit_done;
  world.leave();
  return code;
}

int run(const Options& o) {
  int code = exit_done;
  if (started_by_us()) errors_stay_on_stderr();  // the launcher says it on stdout
  if (auto s = readable_by_every_rank(o.scenario.path); !s) return report_errors(s.error());
  const auto job = load_job(o.scenario, code);
  if (!job) return code;
  if (auto s = on_this_machine(job->scenario, o.on_cpu, "--on-cpu runs its plan here all the same; "); !s)
    return report_errors(s.error());
  if (const std::string& name = job->scenario.name;
      o.out.empty() && (name.empty() || name.find('/') != std::string::npos || name.front() == '.'))
    return report_errors({Diagnostic{.code = "E226",
                                     .message = fmt::format("the scenario's name '{}' is no name of a folder", name),
                                     .where = {o.scenario.path},
                                     .notes = {"without --out the run folder is runs/NAME"},
                                     .help = "set name to a plain word, or give --out"}});
  auto env = launch_env(process_env);
  if (!env) return report_errors(env.error());
  const bool launched = env->has_value();
  if (launched && (*env)->rank != 0) errors_stay_on_stderr();
  if (launched && (*env)->world_size != job->plan.num_ranks())
    return report_errors(
        {Diagnostic{.code = "E704",
                    .message = fmt::format("the plan has {} ranks, but {} processes were launched ({})",
                                           job->plan.num_ranks(), (*env)->world_size, (*env)->source),
                    .where = {},
                    .notes = {},
                    .help = fmt::format("launch {} processes, or change train.layout", job->plan.num_ranks())}});
  if (!launched || (*env)->rank == 0) {  // say it once
    if (auto s = check_drift(o, *job); !s) return report_errors(s.error());
    if (const auto error = fit_error(*job); error && !o.no_fit_check) return report_errors({*error});
    if (auto s = check_writable(run_folder(o, *job).summary()); !s) return report_errors(s.error());
    // Data and weights that cannot be read are said here, before every rank finds out for itself.
    if (auto driver = make_training_driver(job->plan, job->scenario, {}); !driver)
      return report_errors(with_file(driver.error(), o.scenario.path));
  }
  try {
    if (launched) {
      World world(**env);
      return run_rank(o, *job, world);
    }
    if (job->plan.num_ranks() == 1) {
      World world;
      return run_rank(o, *job, world);
    }
    ::setenv("OMP_WAIT_POLICY", "passive", 0);  // ranks share the cores: an idle team must not spin on them
    ::setenv(started_by_us_variable, "1", 1);
    if (!o.scenario.json) std::fprintf(stderr, "starting %d local ranks\n", job->plan.num_ranks());
    const LaunchResult result = spawn_local(job->plan.num_ranks(), o.argv);
    // Exit code 1 is an answer, which rank 0 has given.
    if (!result.message.empty() && result.exit_code != exit_no) report_errors({stopped(result.message)});
    return result.exit_code;
  } catch (const RuntimeFailure& e) {
    return report_errors({stopped(e.what())});
  }
}

/// This process's own command line, with the program's path made absolute.
std::vector<std::string> own_command_line() {
  std::vector<std::string> out;
  if (const auto text = read_file("/proc/self/cmdline"))
    for (std::size_t at = 0; at < text->size();) {
      out.emplace_back(text->c_str() + at);
      at += out.back().size() + 1;
    }
  if (!out.empty()) out[0] = "/proc/self/exe";
  return out;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("run", "execute the plan for real, on CPU ranks");
  add_scenario_options(*sub, o->scenario);
  sub->add_option("--out", o->out, "run folder (default runs/NAME)");
  sub->add_option("--plan", o->plan, "a plan saved by `plan --out`: refuse to run anything else");
  sub->add_option("--transport", o->transport, "collectives over shm or gloo (default: shm on one host)")
      ->check(CLI::IsMember({"shm", "gloo"}));
  sub->add_option("--threads", o->threads, "compute threads of each rank (default: cores / ranks)")
      ->check(thread_count());
  sub->add_option("--trace-steps", o->span_steps, "iterations whose ops are kept in the trace")->check(whole_from(0));
  sub->add_flag("--check", o->check,
                "debug: NaN at the op that made it, poisoned buffers, resident = mapped bytes after every phase");
  sub->add_flag("--no-fit-check", o->no_fit_check,
                "start although the plan does not fit; the arena still enforces the capacity");
  sub->add_flag("--on-cpu", o->on_cpu, "run on this machine's CPU although the scenario's devices are others");
  sub->callback([o, &action] {
    o->argv = own_command_line();
    action = [o] { return run(*o); };
  });
}

}  // namespace hotbunk
