// Whole launches of which a source gives seconds of phases or bytes: each is a scenario beside the table.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <sstream>

#include "planner/answers/answers.h"
#include "planner/validate/validate_tables.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

/// Seconds of the phases named, divided by blanks, or of all; below 0: no such phase.
double seconds_of_phases(const RlPrice& price, const std::string& phases) {
  if (phases == "iteration") return price.iteration_seconds;
  double seconds = 0.0;
  std::istringstream words(phases);
  for (std::string word; words >> word;) {
    const auto named = [&](std::size_t i) { return word == name_of(static_cast<RlPhase>(i)); };
    std::size_t i = 0;
    while (i < num_rl_phases && !named(i)) ++i;
    if (i == num_rl_phases) return -1.0;
    seconds += price.seconds[i];
  }
  return seconds;
}

/// A rank's, in GiB: of the device's fullest moment, of the host; below 0: no such memory.
double gib_of(const RlPrice& price, const std::string& memory) {
  constexpr double unit = 1024.0 * 1024.0 * 1024.0;
  return memory == "device" ? price.peak_bytes() / unit : memory == "host" ? price.host_bytes / unit : -1.0;
}

/// Every row of a table whose column `what` names what is measured in column `unit`: `of` finds it in the launch's
/// price.
TableResult launch_rows(const CsvTable& csv, ValidationContext& context, const std::filesystem::path& launches,
                        ValidationTable out, const char* what, const char* unit,
                        const std::function<double(const RlPrice&, const std::string&)>& of) {
  if (auto has = csv.require({"launch", what, unit}); !has) return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string &launch = cells.text("launch"), &name = cells.text(what);
    double predicted = 0.0;
    const bool plain = !launch.empty() && launch.find_first_of("/\\") == std::string::npos;
    const std::filesystem::path file = launches / (launch + ".yaml");
    std::error_code ignored;
    // Lengths that no source gives are found from one row of a run, which then says nothing itself; its others are
    // predicted with them.
    if (const std::string& found = cells.text("gives"); !found.empty()) {
      cells.refuse(fmt::format("gives the launch's {}, which no source says", found));
    } else if (const std::string& beyond = cells.text("beyond"); !beyond.empty()) {
      cells.refuse(beyond);
    } else if (!plain || !std::filesystem::exists(file, ignored)) {
      cells.refuse("no scenario of the launch beside the table");
    } else if (auto scenario = load_scenario(file.string()); !scenario) {
      cells.refuse(scenario.error().front().message);
    } else if (auto pricer = ScenarioPricer::make(*scenario, context.catalogue()); !pricer) {
      cells.refuse(pricer.error().front().message);
    } else {
      // What a source's timer runs over may be more than the phase it is named after.
      const std::string& covers = cells.text("covers");
      const std::string& measured = covers.empty() ? name : covers;
      predicted = of((*pricer)->price((*pricer)->point()), measured);
      if (predicted < 0.0) cells.refuse(fmt::format("no {} '{}'", what, measured));
      else if (predicted == 0.0) cells.refuse("the launch has no price");
    }
    put(out, fmt::format("{} {}", launch, name), cells, unit, predicted);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace

TableResult validate_rl_phase_seconds(const CsvTable& csv, ValidationContext& context,
                                      const std::filesystem::path& launches) {
  return launch_rows(csv, context, launches,
                     {"rl_phase_seconds",
                      "seconds of a phase",
                      "s",
                      "the launch's own script as a scenario; prompts a quarter of the longest; a phase is what the "
                      "release's timer of that name runs over (covers). Where no source gives lengths, the mean "
                      "response is what a run's own row of training gives, and the spread that with which the longest "
                      "response of an iteration is as long as is allowed",
                      {},
                      {},
                      {},
                      {},
                      true},
                     "phase", "seconds", seconds_of_phases);
}

TableResult validate_rl_launch_memory(const CsvTable& csv, ValidationContext& context,
                                      const std::filesystem::path& launches) {
  return launch_rows(csv, context, launches,
                     {"rl_launch_memory",
                      "memory of a rank",
                      "GiB",
                      "the launch's own script as a scenario; of a host what its ranks hold, not what its node does",
                      {},
                      {},
                      {}},
                     "memory", "gib", gib_of);
}

}  // namespace hotbunk
