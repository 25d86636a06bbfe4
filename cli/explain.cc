#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/plan_page.h"
#include "cli/streams.h"
#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

struct ExplainArguments {
  ScenarioOptions scenario;
  std::string html;
  bool search = false, sensitivity = false, smallest = false;
};

using Json = nlohmann::ordered_json;

int run(const ExplainArguments& o) {
  const auto open = load_scenario(o.scenario.path, o.scenario.sets);
  if (!open) return report_errors(open.error());
  const ChosenScenario loaded = with_choices(*open);
  const Scenario* const scenario = &loaded.scenario;
  note_undisturbed(*scenario, "the price");
  note_auto(*scenario, loaded.exchange);
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer) return report_errors(pricer.error());
  const Explanation e = explain(**pricer);
  Json doc = json_from<Json>(to_json(e));
  std::string text = render(e);
  int code = e.price.fits ? exit_done : exit_no;
  if (o.sensitivity && !e.unpriced) {
    const auto numbers = sensitivity(*scenario, catalog_root());
    if (!numbers) return report_errors(numbers.error());
    doc["sensitivity"] = json_from<Json>(to_json(*numbers));
    text += "\n" + render(*numbers);
  }
  if (o.search) {
    const RlSetting& set = (*pricer)->rl().setting();
    const RlSearch found = search_layouts(**pricer, default_rl_space(*scenario, (*pricer)->train().framework()),
                                          {.device_bytes = set.device_bytes, .host_bytes = set.host_bytes});
    doc["search"] = json_from<Json>(to_json(found));
    text += fmt::format("\nLayouts of these {} ranks, fastest iteration first\n{}", scenario->cluster.ranks(),
                        render(found));
    code = found.best.empty() ? exit_no : exit_done;
  }
  if (o.smallest) {
    // As `plan --gpus ?`: of other clusters nothing is chosen.
    const auto small = smallest_cluster(*open, catalog_root());
    if (!small) return report_errors(small.error());
    doc["smallest"] = json_from<Json>(to_json(*small));
    text += "\n" + render(*small);
    code = small->gpus == 0 ? exit_no : exit_done;
  }
  if (!o.html.empty()) {
    const auto choices = choose_trainer(**pricer, {.budget = 2'000'000});
    if (!choices) return report_errors(choices.error());
    if (auto s = write_plan_page(o.html, **pricer, e, *choices, unsupported_to_execute(*scenario)); !s)
      return report_errors(s.error());
  }
  if (o.scenario.json) print_document(json_text(doc, 2));
  else fmt::print("{}", printable(text));
  flush_output();
  if (e.unpriced) return report_errors({*e.unpriced});
  if (!o.scenario.json)
    fmt::print(stderr, "Seconds are {}.\n",
               e.micro_batch ? "the plan's, replayed with mean lengths" : "the closed form's");
  if (e.price.fits) say_next("simulate", o.scenario);
  else say_cure("plan", o.scenario, e.remedy_flags);  // without any: it ranks all layouts
  return code;
}

}  // namespace

void add_explain(CommandLine& line) {
  auto o = std::make_shared<ExplainArguments>();
  const Command sub =
      line.add_command("explain", "where the bytes and the seconds of a scenario go, and which lever buys what");
  add_scenario_options(sub, o->scenario);
  sub.flag("--search", o->search, "also search training, rollout, sync and sleep together on these ranks");
  sub.flag("--sensitivity", o->sensitivity, "also the effect of 10 % on each number of hardware and workload");
  sub.option("--html", o->html, "also write the answer as a page: memory by moment, seconds, layouts, what if");
  sub.flag("--smallest", o->smallest, "also the fewest nodes on which some layout fits");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
