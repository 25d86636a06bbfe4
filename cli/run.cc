// `run` has two lives: started by a user it becomes the launcher of local ranks; started with torchrun's, Slurm's or
// MPI's variables (also by itself) it is one rank.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/gather.h"
#include "base/check.h"
#include "base/file.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/run_folder.h"
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
  bool no_fit_check = false, check = false, overwrite = false, on_cpu = false;
  std::int32_t span_steps = 2;
  std::int32_t threads = 0;
  std::vector<std::string> argv;
};

Takes takes(const Options& o) { return o.overwrite ? Takes::overwrite : Takes::unused; }

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

/// What the run was and came to; nothing that can fail here loses what was computed: that is said, with exit code 3.
int finish_rank_0(const Options& o, const Job& job, const RunFolder& folder, const Hardware& hardware,
                  const TrainingDriver& driver, std::vector<std::string> parts) {
  std::vector<Trace> traces;
  for (const std::string& text : parts) {
    auto file = trace_from_json(text, "rank's trace");
    HB_CHECK(file.has_value(), "a rank's trace: {}", render(file.error()));
    traces.push_back(std::move(file->trace));
  }
  const Trace measured = merge_traces(traces);
  Diagnostics problems = driver.finish_problems();
  const auto note = [&](const Status& s) {
    if (!s) problems.insert(problems.end(), s.error().begin(), s.error().end());
  };
  if (!driver.sync_hashes().empty())
    note(write_sync_hashes(folder.sync_hashes(), job.scenario.rollout.dtype, driver.sync_hashes()));
  const auto lengths = driver.trained_lengths();
  const auto simulated =
      simulate_job(job, hardware, {.lengths = lengths, .span_steps = o.span_steps, .enforce_capacity = false});
  if (!simulated) note(tl::unexpected(simulated.error()));
  note(write_run_folder(folder, job,
                        {.trace = measured,
                         .predicted = simulated ? &*simulated : nullptr,
                         .lengths = lengths,
                         .calibration = hardware.source}));
  note(end_in_folder(folder));
  std::error_code ignored;
  if (std::filesystem::exists(folder.metrics(), ignored))
    std::filesystem::remove(folder.steps_so_far(), ignored);  // metrics.jsonl says all of it
  auto summary = summarize(job.plan, job.scenario, measured);
  const Comparison compared = simulated ? compare_traces(job.plan, *simulated, measured) : Comparison{};
  if (simulated) summary["equal"] = compared.equal;
  if (o.scenario.json) {
    print_document(summary.dump(1));
    if (simulated && !compared.equal) fmt::print(stderr, "{}", render_comparison(compared, false));
  } else {
    fmt::print("{}\n{}", render_summary(summary, use_colour()),
               simulated ? render_comparison(compared, use_colour()) : "");
    if (problems.empty()) {
      fmt::print("Report: {}\n", printable_line(folder.report().string()));
      std::fflush(stdout);
      say_next("compare " + shell_quoted(folder.root.string()));
    }
  }
  if (!problems.empty()) {
    report_errors(problems);
    return exit_runtime;
  }
  return compared.equal ? exit_done : exit_no;
}

/// The figures of finished steps, on disk while the run goes on: a killed run leaves them, a whole one replaces them by
/// metrics.jsonl. A line reaches the file when its step ends, so `tail -f` follows a run.
class StepLines {
 public:
  explicit StepLines(std::filesystem::path path) : path_(std::move(path)) {}
  void operator()(const StepMetrics& m) {
    if (!file_.is_open()) file_.open(path_, std::ios::trunc);
    nlohmann::ordered_json line = {{"step", m.step}};
    for (const auto& [name, value] : m.values) line[name] = value;
    file_ << line.dump() + '\n' << std::flush;
  }

 private:
  std::filesystem::path path_;
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

/// `hardware`: of rank 0, which simulates at the end.
int run_rank(const Options& o, const Job& job, World& world, const RunFolder& folder,
             const std::optional<Hardware>& hardware) {
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
  if (world.size() > 1) world.barrier("all is read");
  if (first)
    if (auto s = begin_in_folder(folder, job, "measured", takes(o)); !s) return report_errors(s.error());
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
    if (d.code == "E630") {  // every rank has come to it: nobody is lost, and one says it
      if (first) report_errors(trace.error());
      world.leave();
      return exit_runtime;
    }
    // The others learn why before they learn that this rank is gone.
    world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), d.message));
    return report_errors(trace.error());
  }
  const auto parts = gather_strings(world, "results", trace_to_json(*trace, job.hash));
  const int code = first ? finish_rank_0(o, job, folder, *hardware, **driver, parts) : exit_done;
  world.leave();
  return code;
}

int run(const Options& o) {
  int code = exit_done;
  if (is_other_rank()) errors_stay_on_stderr();
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
  if (launched && (*env)->world_size != job->plan.num_ranks())
    return report_errors(
        {Diagnostic{.code = "E704",
                    .message = fmt::format("the plan has {} ranks, but {} processes were launched ({})",
                                           job->plan.num_ranks(), (*env)->world_size, (*env)->source),
                    .where = {},
                    .notes = {},
                    .help = fmt::format("launch {} processes, or change train.layout", job->plan.num_ranks())}});
  ClaimedFolder claimed;
  std::optional<Hardware> hardware;
  if (!launched || (*env)->rank == 0) {  // say it once
    if (auto s = check_drift(o, *job); !s) return report_errors(s.error());
    if (const auto error = fit_error(*job); error && !o.no_fit_check) return report_errors({*error});
    auto claim = claim_folder(o.out, *job, takes(o));
    if (!claim) return report_errors(claim.error());
    claimed = std::move(*claim);
    // What cannot be read is said here: before every rank finds out for itself, or the last step is done.
    auto priced_by = hardware_of(job->scenario);
    if (!priced_by) return report_errors(priced_by.error());
    hardware = std::move(*priced_by);
    if (auto driver = make_training_driver(job->plan, job->scenario, {}); !driver)
      return report_errors(with_file(driver.error(), o.scenario.path));
  }
  try {
    if (launched) {
      World world(**env);
      return run_rank(o, *job, world, claimed.folder, hardware);
    }
    if (job->plan.num_ranks() == 1) {
      World world;
      return run_rank(o, *job, world, claimed.folder, hardware);
    }
    ::setenv("OMP_WAIT_POLICY", "passive", 0);  // ranks share the cores: an idle team must not spin on them
    pass_on_claim(claimed);
    if (!o.scenario.json) std::fprintf(stderr, "starting %d local ranks\n", job->plan.num_ranks());
    const LaunchResult result = spawn_local(job->plan.num_ranks(), o.argv);
    // Exit code 1 is an answer, which rank 0 has given; where all ranks ended alike, none of them is to be named.
    const bool alike = std::ranges::all_of(
        result.ranks, [&](const RankExit& e) { return e.signal == 0 && e.exit_code == result.exit_code; });
    if (rank_0_spoke(result)) errors_stay_on_stderr();
    if (!result.message.empty() && result.exit_code != exit_no && !alike) report_errors({stopped(result.message)});
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
  sub->add_option("--out", o->out, "run folder (default runs/NAME, or runs/NAME-2, … when that holds a run)");
  sub->add_flag("--overwrite", o->overwrite, "remove what an earlier run wrote in the run folder");
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
