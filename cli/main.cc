// hotbunk: plan, simulate and run colocated RL post-training. One file per subcommand; this one only finds it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "cli/command.h"
#include "cli/output.h"

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
  std::vector<std::string> commands;
  for (const CLI::App* sub : app.get_subcommands({})) commands.push_back(sub->get_name());
  if (argc > 1 && argv[1][0] != '-' && std::ranges::find(commands, argv[1]) == commands.end()) {
    const std::string nearest = nearest_name(argv[1], commands);
    std::fprintf(stderr, "error[E126]: there is no command '%s'\n   = help: %s\n", argv[1],
                 nearest.empty() ? "hotbunk --help lists them" : ("did you mean " + nearest + "?").c_str());
    return exit_bad_input;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? exit_done : exit_bad_input;
  }
  try {
    const int code = action();
    if (auto s = finish_output(); !s) return report_errors(s.error());
    return code;
  } catch (const std::exception& e) {
    return report_errors({uncaught(e)});
  }
}
