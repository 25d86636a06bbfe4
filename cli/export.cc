// hotbunk export: a scenario as the launch arguments of another system.
#include "interop/export.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/streams.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

struct ExportArguments {
  std::string system;
  ScenarioOptions scenario;
};

/// That export writes: the systems whose launches are whole in their arguments.
std::vector<std::string> exported_systems() { return {"verl", "slime", "nemo-rl", "megatron"}; }

int run(const ExportArguments& o) {
  const auto table = read_launch_table(o.system);
  if (!table) return report_errors(table.error());
  const auto scenario = load_scenario(o.scenario.path, o.scenario.sets);
  if (!scenario) return report_errors(scenario.error());
  if (auto why = why_not_exported(*table, *scenario)) {
    why->where = {o.scenario.path};
    return report_errors({*why});
  }
  const ExportedLaunch launch = export_launch(*table, *scenario);
  if (o.scenario.json) {
    nlohmann::ordered_json arguments;
    for (const auto& [key, value] : launch.arguments) arguments[key] = value;
    const nlohmann::ordered_json doc = {{"schema", "hotbunk.export/1"}, {"system", table->system},
                                        {"release", table->release},    {"command", launch.command},
                                        {"arguments", arguments},       {"unsaid", launch.unsaid},
                                        {"text", launch.text}};
    print_document(json_text(doc, 2));
  } else {
    print_result(printable(launch.text));
  }
  return exit_done;
}

}  // namespace

void add_export(CommandLine& line) {
  auto o = std::make_shared<ExportArguments>();
  const Command sub =
      line.add_command("export", "a scenario as the launch arguments of verl, slime, NeMo-RL or Megatron");
  sub.option("system", o->system, "whose launch").required().check(one_of(exported_systems()));
  add_scenario_options(sub, o->scenario);
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
