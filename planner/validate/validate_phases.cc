// Phases of whole launches that a source gives seconds of: the launch is a scenario beside the table.
#include <fmt/format.h>

#include <algorithm>

#include "planner/answers/answers.h"
#include "planner/validate/validate_tables.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

/// Launches whose scenario states lengths that no source gives: what is predicted of them shows the plumbing alone.
constexpr const char* lengths_unknown[] = {"verl-qwen2.5-math-7b-32xh20-async"};

/// Seconds of the phase, or of all; below 0: no such phase.
double seconds_of_phase(const RlPrice& price, const std::string& phase) {
  if (phase == "iteration") return price.iteration_seconds;
  for (std::size_t i = 0; i < num_rl_phases; ++i)
    if (phase == name_of(static_cast<RlPhase>(i))) return price.seconds[i];
  return -1.0;
}

}  // namespace

TableResult validate_rl_phase_seconds(const CsvTable& csv, ValidationContext& context,
                                      const std::filesystem::path& launches) {
  ValidationTable out{"rl_phase_seconds",
                      "seconds of a phase",
                      "s",
                      "the launch's own script as a scenario; prompts a quarter of the longest",
                      {},
                      {},
                      {}};
  if (auto has = csv.require({"launch", "phase", "seconds"}); !has) return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string &launch = cells.text("launch"), &phase = cells.text("phase");
    double seconds = 0.0;
    const bool plain = !launch.empty() && launch.find_first_of("/\\") == std::string::npos;
    const std::filesystem::path file = launches / (launch + ".yaml");
    std::error_code ignored;
    if (std::ranges::find(lengths_unknown, launch) != std::end(lengths_unknown)) {
      cells.refuse("the source gives no prompt and response lengths");
    } else if (!plain || !std::filesystem::exists(file, ignored)) {
      cells.refuse("no scenario of the launch beside the table");
    } else if (auto scenario = load_scenario(file.string()); !scenario) {
      cells.refuse(scenario.error().front().message);
    } else if (auto pricer = ScenarioPricer::make(*scenario, context.catalogue()); !pricer) {
      cells.refuse(pricer.error().front().message);
    } else {
      seconds = seconds_of_phase((*pricer)->price((*pricer)->point()), phase);
      if (seconds < 0.0) cells.refuse(fmt::format("no phase '{}'", phase));
      else if (seconds == 0.0) cells.refuse("the launch has no price");
    }
    put(out, fmt::format("{} {}", launch, phase), cells, "seconds", seconds);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
