#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/command.h"
#include "planner/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

struct Options {
  ScenarioOptions scenario;
  bool search = false, sensitivity = false, smallest = false;
};

int search_layouts(const ScenarioPricer& pricer) {
  SearchOptions options;
  options.device_bytes = pricer.rl().setting().device_bytes;
  options.host_bytes = pricer.rl().setting().host_bytes;
  const RlSearch found = search_rl(pricer.rl(), default_rl_space(pricer.scenario()), options);
  fmt::print("\nLayouts of these {} ranks, fastest iteration first\n{}", pricer.scenario().cluster.ranks(),
             render(found));
  return found.best.empty() ? exit_no : exit_done;
}

int run(const Options& o) {
  const auto scenario = load_scenario(o.scenario.path, o.scenario.sets);
  if (!scenario) return report_errors(scenario.error());
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer) return report_errors(pricer.error());
  const Explanation e = explain(**pricer);
  if (o.scenario.json) {
    fmt::print("{}\n", to_json(e));
    return e.price.fits ? exit_done : exit_no;
  }
  fmt::print("{}", render(e));
  int code = e.price.fits ? exit_done : exit_no;
  if (o.sensitivity) {
    const auto numbers = sensitivity(*scenario, catalog_root());
    if (!numbers) return report_errors(numbers.error());
    fmt::print("\n{}", render(*numbers));
  }
  if (o.search) code = search_layouts(**pricer);
  if (o.smallest) {
    const auto small = smallest_cluster(*scenario, catalog_root());
    if (!small) return report_errors(small.error());
    fmt::print("\n{}", render(*small));
    code = small->nodes == 0 ? exit_no : exit_done;
  }
  std::fflush(stdout);
  fmt::print(stderr, "These are the closed form's figures. Next: hotbunk simulate {}\n", o.scenario.path);
  return code;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("explain", "where the bytes and the seconds of a scenario go, and which lever buys what");
  add_scenario_options(*sub, o->scenario);
  sub->add_flag("--search", o->search, "also search training, rollout, sync and sleep together on these ranks");
  sub->add_flag("--sensitivity", o->sensitivity, "also the effect of 10 % on each number of hardware and workload");
  sub->add_flag("--smallest", o->smallest, "also the fewest nodes on which some layout fits");
  sub->callback([o, &action] { action = [o] { return run(*o); }; });
}

}  // namespace hotbunk
