// hotbunk lint: what goes wrong with a scenario, by rules with numbers.
#include "planner/answers/lint.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "base/printable.h"
#include "cli/command.h"
#include "cli/streams.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

struct LintArguments {
  ScenarioOptions scenario;
};

int run(const LintArguments& o) {
  const auto loaded = load_chosen(o.scenario);
  if (!loaded) return report_errors(loaded.error());
  const Scenario* const scenario = &loaded->scenario;
  if (loaded->exchange) note_auto(*scenario, loaded->exchange);
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer) return report_errors(pricer.error());
  const std::vector<Finding> findings = lint(**pricer);
  if (o.scenario.json) print_document(to_json(scenario->name, findings));
  else print_result(printable(render(findings)));
  flush_output();
  const bool fails = std::ranges::any_of(findings, [](const Finding& f) { return f.level == LintLevel::error; });
  say_next("explain", o.scenario);
  return fails ? exit_no : exit_done;
}

}  // namespace

void add_lint(CommandLine& line) {
  auto o = std::make_shared<LintArguments>();
  const Command sub = line.add_command("lint", "what goes wrong with a scenario on a cluster: rules with numbers");
  add_scenario_options(sub, o->scenario);
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
