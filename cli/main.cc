// hotbunk: plan, simulate and run colocated RL post-training. One file per subcommand; this one only finds it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <exception>
#include <sstream>
#include <string_view>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/streams.h"
#include "cli/usage.h"

int main(int argc, char** argv) {
  using namespace hotbunk;
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of the write that meets it
  if (auto s = check_standard_streams(); !s) return report_errors(s.error());
  CLI::App app{"hotbunk plans, simulates and runs colocated RL post-training of LLMs", "hotbunk"};
  app.set_version_flag("--version", HOTBUNK_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 failure at run time.");
  Action action;
  add_plan(app, action);
  add_simulate(app, action);
  add_run(app, action);
  add_report(app, action);
  add_compare(app, action);
  add_explain(app, action);
  add_sweep(app, action);
  add_validate(app, action);
  add_calibrate(app, action);
  add_doctor(app, action);
  add_logprobs(app, action);
  add_generate(app, action);
  for (int i = 1; i < argc; ++i)
    if (argv[i] == std::string_view("--json")) errors_as_json();
  const auto& commands = app.get_subcommands({});
  const auto is_first_word = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && std::ranges::none_of(commands, is_first_word))
    return end_process(report_errors({no_such_command(app, argv[1])}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      app.exit(e, text, text);
      print_result(text.str());
      const Status printed = finish_output();
      return printed ? exit_done : report_errors(printed.error());
    }
    return end_process(report_errors({usage_error(app, e)}));
  }
  try {
    const int code = action();
    if (auto s = finish_output(); !s) return end_process(report_errors(s.error()));
    return end_process(code);
  } catch (const std::exception& e) {
    return end_process(report_errors({uncaught(e)}));
  }
}
