#include "trace/compare.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/command.h"
#include "cli/run_facts.h"
#include "cli/streams.h"
#include "graph/print.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

struct CompareArguments {
  std::string folder, other;
  std::optional<double> max_error;
  bool json = false;
};

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

/// Two saved plans: what they were made from, and what the second does otherwise.
int compare_plans(const CompareArguments& o) {
  std::vector<PlanFile> plans;
  for (const std::string& path : {o.folder, o.other}) {
    auto plan = saved_plan(path);
    if (!plan) return report_errors(plan.error());
    plans.push_back(std::move(*plan));
  }
  const std::string hashes[] = {plan_hash(plans[0].plan), plan_hash(plans[1].plan)};
  std::vector<std::string> lines = differences(plans[0].made_from, "first", plans[1].made_from, "second");
  std::istringstream changes(diff_plans(plans[0].plan, plans[1].plan));
  for (std::string line; std::getline(changes, line);) lines.push_back(line);
  const bool equal = lines.empty();
  if (o.json) {
    print_document(json_text(nlohmann::ordered_json{{"schema", "hotbunk.plan-difference/1"},
                                                    {"equal", equal},
                                                    {"plans", {hashes[0], hashes[1]}},
                                                    {"differences", lines}},
                             1));
  } else {
    fmt::print("{}", equal ? fmt::format("Both are plan {}\n", hashes[0])
                           : fmt::format("plan {} -> {}\n", hashes[0], hashes[1]));
    for (const std::string& line : lines) fmt::print("{}\n", printable_line(line));
  }
  flush_output();
  if (!o.json) say_next("run SCENARIO --plan " + shell_quoted(o.other));
  return equal ? exit_done : exit_no;
}

/// The other side: another run of the same plan, or a simulation with the lengths that the run had.
Result<Trace> other_side(const CompareArguments& o, const LoadedRun& run) {
  if (!o.other.empty()) {
    auto loaded = read_run_folder({o.other});
    if (!loaded) return tl::unexpected(loaded.error());
    if (loaded->job.hash != run.job.hash)
      return fail(Diagnostic{
          .code = "E511",
          .message = "the two run folders are of different plans",
          .where = {o.other},
          .notes = {fmt::format("{} has plan {}, {} has {}", o.folder, run.job.hash, o.other, loaded->job.hash)},
          .help = fmt::format("compare runs of one plan; how the plans differ: hotbunk compare {} {}",
                              shell_quoted(RunFolder{o.folder}.plan().string()),
                              shell_quoted(RunFolder{o.other}.plan().string()))});
    return std::move(loaded->trace);
  }
  const auto hardware = hardware_of(run.job.scenario);
  if (!hardware) return tl::unexpected(hardware.error());
  SimulateOptions options{.lengths = {}, .walked = run.walked, .enforce_capacity = false, .every_op = true};
  std::error_code ignored;
  if (const RunFolder folder{o.folder}; std::filesystem::exists(folder.lengths(), ignored)) {
    auto lengths = lengths_of(folder, run.job.scenario, run.walked);
    if (!lengths) return tl::unexpected(lengths.error());
    options.lengths = std::move(*lengths);
  }
  return simulate_job(run.job, *hardware, options);
}

int run(const CompareArguments& o) {
  if (is_file(o.folder) && is_file(o.other)) {
    if (o.max_error)
      return report_errors({Diagnostic{.code = "E144",
                                       .message = "--max-error is of runs: two plans have no times",
                                       .where = {o.folder},
                                       .notes = {},
                                       .help = "leave --max-error out"}});
    return compare_plans(o);
  }
  if (is_file(o.folder) && o.other.empty())
    return report_errors({Diagnostic{.code = "E127",
                                     .message = "a file is no run folder, and one plan alone is beside nothing",
                                     .where = {o.folder},
                                     .notes = {},
                                     .help = "give the folder of `hotbunk run`; or two saved plans"}});
  auto loaded = read_run_folder({o.folder});
  if (!loaded) return report_errors(loaded.error());
  if (loaded->trace.source != "measured")
    return report_errors({Diagnostic{.code = "E512",
                                     .message = "the run folder was not measured: its trace is simulated",
                                     .where = {o.folder},
                                     .notes = {},
                                     .help = "give the folder of `hotbunk run`; a simulation may come second"}});
  const auto other = other_side(o, *loaded);
  if (!other) return report_errors(other.error());
  const Comparison c = compare_traces(loaded->job.plan, *other, loaded->trace);
  const bool within = !o.max_error || std::abs(c.iteration_error) <= *o.max_error;
  if (o.json) print_document(json_text(comparison_to_json(c), 1));
  else fmt::print("{}", render_comparison(c, use_colour()));
  if (!o.json && !within)
    fmt::print("The iteration's time error {:+.1f} % is out of the bound of {:.1f} %\n", 100 * c.iteration_error,
               100 * *o.max_error);
  flush_output();
  if (!o.json) say_next("report " + shell_quoted(o.folder));
  return c.equal && within ? exit_done : exit_no;
}

}  // namespace

void add_compare(CommandLine& line) {
  auto o = std::make_shared<CompareArguments>();
  const Command sub = line.add_command(
      "compare",
      "simulated beside measured: bytes and calls must be equal, times come with their error; or a saved plan beside "
      "another");
  sub.option("folder", o->folder, "run folder of a measured run; or a plan that `plan --out` saved").required();
  sub.option("other", o->other,
             "another run folder of the same plan (default: simulate with the run's lengths); or another saved plan");
  sub.option("--max-error", o->max_error, "exit 1 when the iteration's time error is larger than this fraction")
      .check(finite_in(0.0, 1e6));
  sub.flag("--json", o->json, "one JSON document on stdout, nothing else there");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
