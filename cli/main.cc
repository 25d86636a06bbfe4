// hotbunk: plan, simulate and run colocated RL post-training. One file per subcommand; this one only finds it.
#include <csignal>
#include <exception>
#include <string_view>

#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/output.h"
#include "cli/streams.h"
#include "runtime/stuck.h"

int main(int argc, char** argv) {
  using namespace hotbunk;
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of the write that meets it
  if (auto s = check_standard_streams(); !s) return report_errors(s.error());
  on_stuck_end(end_stuck_output);
  CommandLine line;
  add_plan(line);
  add_simulate(line);
  add_run(line);
  add_report(line);
  add_compare(line);
  add_explain(line);
  add_sweep(line);
  add_layout(line);
  add_validate(line);
  add_import(line);
  add_export(line);
  add_lint(line);
  add_solve(line);
  add_calibrate(line);
  add_doctor(line);
  add_logprobs(line);
  add_generate(line);
  for (int i = 1; i < argc; ++i)
    if (argv[i] == std::string_view("--json")) errors_as_json();
  const auto action = line.read(argc, argv);
  if (!action) return end_process(report_errors(action.error()));
  try {
    const int code = (*action)();
    if (auto s = finish_output(); !s) return end_process(report_errors(s.error()));
    return end_process(code);
  } catch (const std::exception& e) {
    return end_process(report_errors({uncaught(e)}));
  }
}
