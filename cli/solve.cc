// hotbunk solve: how far one key of a scenario can go.
#include "planner/answers/solve.h"

#include <filesystem>
#include <memory>
#include <utility>

#include "base/printable.h"
#include "cli/command.h"
#include "cli/streams.h"
#include "spec/catalog.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

struct SolveArguments {
  std::string key;
  ScenarioOptions scenario;
};

int run(SolveArguments o) {
  // Other commands begin with the scenario: either order is meant, also beside a key that is none.
  std::error_code ignored;
  const bool is_file = std::filesystem::exists(o.key, ignored) && !std::filesystem::exists(o.scenario.path, ignored);
  if (find_scenario_key(o.key) == nullptr && (find_scenario_key(o.scenario.path) != nullptr || is_file))
    std::swap(o.key, o.scenario.path);
  const auto solved = solve(o.scenario.path, o.scenario.sets, o.key, catalog_root());
  if (!solved) return report_errors(solved.error());
  if (o.scenario.json) print_document(to_json(*solved));
  else print_result(printable(render(*solved)));
  flush_output();
  if (solved->value.empty()) say_next("plan", o.scenario);
  else if (solved->beside.empty()) say_cure("explain", o.scenario, {o.key + "=" + solved->value});
  else say_cure("explain", o.scenario, {o.key + "=" + solved->value, solved->beside});
  return solved->value.empty() ? exit_no : exit_done;
}

}  // namespace

void add_solve(CommandLine& line) {
  auto o = std::make_shared<SolveArguments>();
  const Command sub = line.add_command("solve", "the largest value of one key with which a scenario fits");
  sub.option("key", o->key, "a number's key, such as workload.response_tokens.max").required();
  add_scenario_options(sub, o->scenario);
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
