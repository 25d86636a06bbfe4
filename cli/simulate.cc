#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "cli/command.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

struct Options {
  ScenarioOptions scenario;
  std::string out, lengths;
  std::int32_t span_steps = 2;
};

int run(const Options& o) {
  int code = exit_done;
  const auto job = load_job(o.scenario, code);
  if (!job) return code;
  const auto hardware = hardware_of(job->scenario);
  if (!hardware) return report_errors(hardware.error());
  const auto error = fit_error(*job);
  const auto trace = simulate_job(
      *job, *hardware, {.recorded_lengths = o.lengths, .span_steps = o.span_steps, .enforce_capacity = false});
  if (!trace) return report_errors(trace.error());
  const auto summary = summarize(job->plan, job->scenario, *trace);
  if (o.scenario.json) fmt::print("{}\n", summary.dump(1));
  else fmt::print("{}", render_summary(summary, use_colour()));
  std::fflush(stdout);
  if (!o.out.empty()) {
    if (auto s = write_run_folder({o.out}, *job, *trace, nullptr, hardware->source); !s)
      return report_errors(s.error());
    if (!o.scenario.json) fmt::print("Report: {}/report.html\n", o.out);
  }
  if (error) {
    report_errors({*error});
    return exit_no;
  }
  if (!o.scenario.json) fmt::print("Next: hotbunk run {}\n", o.scenario.path);
  return exit_done;
}

}  // namespace

void add_simulate(CLI::App& app, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("simulate", "execute the plan in virtual time: memory to the byte, traffic, timeline");
  add_scenario_options(*sub, o->scenario);
  sub->add_option("--out", o->out, "write a run folder (plan, trace, summary, report) there");
  sub->add_option("--lengths", o->lengths, "replay a run's lengths.jsonl instead of drawing lengths");
  sub->add_option("--trace-steps", o->span_steps, "iterations whose ops are kept in the trace")
      ->check(CLI::NonNegativeNumber);
  sub->callback([o, &action] { action = [o] { return run(*o); }; });
}

}  // namespace hotbunk
