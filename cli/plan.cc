#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/parallel.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/plan_page.h"
#include "cli/run_facts.h"
#include "cli/streams.h"
#include "graph/plan_json.h"
#include "graph/print.h"
#include "planner/answers/choices.h"
#include "planner/answers/headline.h"
#include "planner/answers/levers.h"
#include "planner/answers/lint.h"
#include "planner/answers/stated_error.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "trace/summary.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

constexpr double unset = -1;

struct PlanArguments {
  ScenarioOptions scenario;
  bool resolved = false, print = false, details = false;
  std::string phase, out, html;
  std::string objective = "seconds", gpus, within;
  double headroom = unset;
  std::size_t top = 5;
  std::int64_t budget = 2'000'000;
};

using Json = nlohmann::ordered_json;

Json categories(const CategoryBytes& bytes) {
  Json out = Json::object();
  for (int c = 0; c < num_categories; ++c)
    out[std::string(name_of(static_cast<Category>(c)))] = bytes[static_cast<std::size_t>(c)];
  return out;
}

Json plan_document(const Job& job, const FitReport& fit, bool fits) {
  const RankMemory memory = static_memory(job.plan, fit.worst_rank);
  Json phases = Json::array();
  for (const auto& [phase, peak] : memory.device.phase_peaks)
    phases.push_back({{"name", job.plan.phases[static_cast<std::size_t>(phase)].name},
                      {"peak_bytes", peak.peak_bytes},
                      {"mapped_peak_bytes", peak.mapped_peak_bytes},
                      {"by_category", categories(peak.by_category)}});
  Json largest = Json::array();
  for (const LiveBuffer& b : live_at_peak(job.plan, fit.worst_rank)) {
    largest.push_back({{"name", b.name}, {"category", name_of(b.category)}, {"bytes", b.bytes}});
    if (largest.size() == 10) break;
  }
  return {{"schema", "hotbunk.plan/1"},
          {"scenario", job.scenario.name},
          {"lowered", true},
          {"plan_hash", job.hash},
          {"fits", fits},
          {"ranks", job.plan.num_ranks()},
          {"rank_classes", job.plan.programs.size()},
          {"capacity_bytes", job.plan.device_capacity_bytes},
          {"overhead_bytes", job.plan.overhead_bytes},
          {"peak_rank", fit.worst_rank},
          {"peak_bytes", memory.device.peak_bytes},
          {"mapped_peak_bytes", memory.device.mapped_peak_bytes},
          {"host_mapped_peak_bytes", memory.host.mapped_peak_bytes},
          {"phases", phases},
          {"largest_at_peak", largest}};
}

std::string render_memory(const Job& job, const FitReport& fit) {
  const RankMemory memory = static_memory(job.plan, fit.worst_rank);
  std::string out = fmt::format("{}: {} ranks in {} classes, plan {}\n\n", printable_line(job.scenario.name),
                                job.plan.num_ranks(), job.plan.programs.size(), job.hash);
  out += fmt::format("Device memory of rank {}, live bytes at each phase's peak (MiB)\n", fit.worst_rank);
  std::vector<std::string> head = {"phase", "peak", "mapped"};
  for (int c = 0; c < num_categories - 1; ++c) head.emplace_back(name_of(static_cast<Category>(c)));
  TextTable table(head);
  const auto in_mib = [](std::int64_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / mib); };
  for (const auto& [phase, peak] : memory.device.phase_peaks) {
    std::vector<std::string> row = {job.plan.phases[static_cast<std::size_t>(phase)].name, in_mib(peak.peak_bytes),
                                    in_mib(peak.mapped_peak_bytes)};
    for (int c = 0; c < num_categories - 1; ++c) row.push_back(in_mib(peak.by_category[static_cast<std::size_t>(c)]));
    table.add(row);
  }
  out += table.str() + "\nLargest tensors at the peak:\n";
  const auto live = live_at_peak(job.plan, fit.worst_rank);
  for (std::size_t i = 0; i < std::min<std::size_t>(5, live.size()); ++i)
    out += fmt::format("  {:>12}  {:<14} {}\n", format_bytes(static_cast<double>(live[i].bytes)),
                       name_of(live[i].category), live[i].name);
  if (memory.host.mapped_peak_bytes > 0)
    out += fmt::format("Host memory per rank: {}\n", format_bytes(static_cast<double>(memory.host.mapped_peak_bytes)));
  return out;
}

/// What the answer says of the scenario's own plan.
struct PlanReport {
  FitReport fit;
  std::optional<Diagnostic> error;  // it does not fit
  Json document;                    // of --json
  std::string memory;               // else, with --details
};
PlanReport report_on(const Job& job, const PlanArguments& o) {
  PlanReport out;
  out.fit = check_fit(job.plan);
  out.error = fit_error(job, out.fit);
  if (o.scenario.json) out.document = plan_document(job, out.fit, !out.error);
  else if (o.details) out.memory = render_memory(job, out.fit);
  return out;
}

/// The best layouts of the same GPUs.
Result<Choices> best_layouts(const PlanArguments& o, const ScenarioPricer& pricer) {
  auto objective = objective_named(o.objective);
  if (!objective) return fail(objective.error());
  return choose_trainer(pricer, {*objective, o.headroom == unset ? std::nullopt : std::optional(o.headroom), o.top,
                                 o.budget, o.scenario.json || !o.html.empty()});
}

/// The first lines, in colour on a terminal; then what ranks.
void print_answer(const PlanArguments& o, const ScenarioPricer& pricer, const Choices& choices,
                  const std::vector<Finding>& findings, const std::string& details) {
  // Names come out of files: made printable before there are colours.
  const bool colour = use_colour();
  const std::string head = headline(pricer, choices, findings, false);
  fmt::print("{}", printable(head) == head ? headline(pricer, choices, findings, colour) : printable(head));
  if (o.details) fmt::print("\n{}", printable(details));
  fmt::print("\n{}", printable(render(choices)));
  if (!o.details) fmt::print("\n--details: where bytes and seconds go, phase by phase\n");
  flush_output();
  fmt::print(stderr, "{}", printable(render_beside(findings)));
}

/// What nothing lowers yet is priced in closed form; the answer says so.
int price(const PlanArguments& o, const Scenario& scenario, const std::vector<std::string>& reasons) {
  const auto pricer = ScenarioPricer::make(scenario, catalog_root());
  if (!pricer) return report_errors(pricer.error());
  const auto choices = best_layouts(o, **pricer);
  if (!choices) return report_errors(choices.error());
  const Explanation e = explain(**pricer);
  const std::vector<Finding> findings = lint_beside(**pricer, e);
  if (o.scenario.json) {
    Json doc = {{"schema", "hotbunk.plan/1"},
                {"scenario", scenario.name},
                {"lowered", false},
                {"why_not_lowered", reasons},
                {"fits", e.price.fits},
                {"verdict", name_of(e.verdict.verdict)},
                {"ranks", scenario.cluster.ranks()},
                {"capacity_bytes", e.capacity_bytes},
                {"peak_bytes", e.price.peak_bytes()},
                {"explanation", json_from<Json>(to_json(e))},
                {"findings", json_from<Json>(to_json(scenario.name, findings))["findings"]}};
    doc["search"] = json_from<Json>(to_json(*choices));
    print_document(json_text(doc, 1));
  } else {
    print_answer(o, **pricer, *choices, findings, render(e));
  }
  flush_output();
  if (!o.html.empty())
    if (auto s = write_plan_page(o.html, **pricer, e, *choices, reasons); !s) return report_errors(s.error());
  for (const std::string& why : reasons)
    fmt::print(stderr, "note: {}not lowered to a plan: {}\n", e.unpriced ? "" : "priced, ", printable(why));
  for (const std::string& what : without_effect(scenario, false)) fmt::print(stderr, "note: {}\n", printable(what));
  if (e.unpriced) return report_errors({*e.unpriced});
  // A row that does not fit is not looked into, but changed: by what was tried, else to a layout that fits, else to
  // more GPUs.
  const auto fits = std::ranges::find_if(choices->rows, [](const ChoiceRow& row) { return row.price.fits; });
  if (e.price.fits) say_next("explain", o.scenario, "--sensitivity");
  else if (!e.remedy_flags.empty()) say_cure("explain", o.scenario, e.remedy_flags);
  else if (fits != choices->rows.end()) say_cure("explain", o.scenario, fits->flags);
  else say_next("plan", o.scenario, "--gpus '?'");
  return e.price.fits ? exit_done : exit_no;
}

/// "600s", "10m", "1.5h"; E265 for anything else.
Result<double> seconds_of(const std::string& text) {
  constexpr std::pair<char, double> units[] = {{'s', 1}, {'m', 60}, {'h', 3600}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const auto unit = std::ranges::find(units, *end, &std::pair<char, double>::first);
  if (end != text.c_str() && unit != std::end(units) && end[1] == 0 && std::isfinite(number) && number > 0)
    return number * unit->second;
  return fail(Diagnostic{.code = "E265",
                         .message = fmt::format("--within {}: no duration", text),
                         .where = {},
                         .notes = {},
                         .help = "a number above 0 and its unit: 600s, 10m, 1.5h"});
}

/// --gpus ? and --within: the smallest cluster of the scenario's kind on which some layout fits, and is as fast.
int smallest(const PlanArguments& o, const Scenario& scenario) {
  const auto objective = objective_named(o.objective);
  if (!objective) return report_errors(objective.error());
  double within = std::numeric_limits<double>::infinity();
  if (!o.within.empty()) {
    const auto seconds = seconds_of(o.within);
    if (!seconds) return report_errors(seconds.error());
    within = *seconds;
    if (*objective != Objective::seconds)
      return report_errors({{.code = "E265",
                             .message = "--within looks for seconds, and --objective for something else",
                             .where = {},
                             .notes = {fmt::format("--objective {}", o.objective)},
                             .help = "leave --objective out"}});
  }
  double headroom = o.headroom;
  if (headroom == unset) {
    const auto frame = framework_named(scenario.profile, catalog_root());
    headroom = frame && !unsupported_to_execute(scenario).empty() ? frame->memory_error.value : 0.0;
  }
  const auto small = smallest_cluster(
      scenario, catalog_root(), {.keep = o.top, .objective = *objective, .headroom = headroom, .most_points = o.budget},
      1024, within);
  if (!small) return report_errors(small.error());
  if (o.scenario.json) {
    Json doc = {{"schema", "hotbunk.smallest/1"},
                {"scenario", scenario.name},
                {"reason", small->search.reason},
                {"layout", small->search.best.empty() ? "" : describe(small->search.best[0].point)}};
    doc.update(json_from<Json>(to_json(*small)));
    print_document(json_text(doc, 1));
  } else {
    fmt::print("{}", printable(render(*small)));
  }
  return small->gpus == 0 ? exit_no : exit_done;
}

/// `plan --print`: the whole plan or one phase of it.
int print(const PlanArguments& o, const Plan& plan) {
  std::vector<std::string> names;
  for (const PhaseInfo& p : plan.phases) names.push_back(p.name);
  if (!o.phase.empty() && std::find(names.begin(), names.end(), o.phase) == names.end()) {
    const std::string nearest = nearest_name(o.phase, names);
    return report_errors({{.code = "E129",
                           .message = fmt::format("the plan has no phase '{}'", o.phase),
                           .where = {},
                           .notes = {fmt::format("its phases: {}", fmt::join(names, ", "))},
                           .help = nearest.empty() ? "" : "did you mean " + nearest + "?"}});
  }
  if (!o.scenario.json) {
    fmt::print("{}", printable(print_plan(plan, {.phase = o.phase})));
    return exit_done;
  }
  Json doc = json_from<Json>(plan_to_json(plan));
  for (Json& program : doc["programs"])
    for (std::size_t i = 0; i < names.size(); ++i)
      if (!o.phase.empty() && names[i] != o.phase) program["phases"][i] = Json::array();
  print_document(json_text(doc));
  return exit_done;
}

/// A search lowers some hundred plans and drops them again: what they lay in is kept for the next one, instead of being
/// given back to the system and had anew. For a program that ends soon; a twenty-fifth of the time of a plan of 8 GPUs.
void keep_freed_memory() {
  constexpr int kept_bytes = 1 << 30, ahead_bytes = 1 << 26, mapped_apart_bytes = 1 << 25;  // the most that glibc takes
  mallopt(M_MMAP_THRESHOLD, mapped_apart_bytes);
  mallopt(M_TRIM_THRESHOLD, kept_bytes);
  mallopt(M_TOP_PAD, ahead_bytes);
}

int run(const PlanArguments& o) {
  keep_freed_memory();
  int code = exit_done;
  if (o.resolved) {
    const auto resolved = load_chosen(o.scenario);
    if (!resolved) return report_errors(resolved.error());
    if (o.scenario.json) print_document(resolved_json(resolved->scenario));
    else fmt::print("{}", resolved_yaml(resolved->scenario));
    return exit_done;
  }
  auto open = load_scenario(o.scenario.path, o.scenario.sets);
  if (!open) return report_errors(open.error());
  note_undisturbed(*open, "the plan");
  note_auto(*open);
  // Of other clusters: what this one's layout chooses says nothing of them, and the ring takes less memory.
  if (o.gpus == "?" || !o.within.empty()) return smallest(o, *open);
  const ChosenScenario loaded = with_choices(std::move(*open));
  const Scenario* const scenario = &loaded.scenario;
  if (const auto reasons = unsupported_to_execute(*scenario); !reasons.empty() && !o.print && o.out.empty())
    return price(o, *scenario, reasons);
  std::optional<Job> job;
  PlanReport report;
  Result<Choices> choices;
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer && !o.print) return report_errors(pricer.error());
  in_parallel(o.print ? 1 : 2, [&](std::size_t i) {
    if (i == 1) {
      choices = best_layouts(o, **pricer);
      return;
    }
    job = simulated_job(*scenario, code);
    if (job && !o.print) report = report_on(*job, o);
  });
  if (!job) return code;
  if (!o.out.empty())
    if (auto s = write_file_atomic(o.out, plan_to_json(job->plan, scenario_facts(job->scenario))); !s)
      return report_errors(s.error());
  if (o.print) return print(o, job->plan);
  if (!choices) return report_errors(choices.error());
  const std::vector<Finding> findings = lint_beside(**pricer, *choices);
  if (o.scenario.json) {
    report.document["findings"] = json_from<Json>(to_json(scenario->name, findings))["findings"];
    report.document["search"] = json_from<Json>(to_json(*choices));
    if (loaded.exchange) report.document["context_exchange"] = json_from<Json>(to_json(*loaded.exchange));
    print_document(json_text(report.document, 1));
  } else {
    print_answer(o, **pricer, *choices, findings, report.memory);
    if (loaded.exchange) fmt::print("train.context_exchange auto: {}\n", render(*loaded.exchange));
  }
  if (!o.html.empty()) {
    if (auto s = write_plan_page(o.html, **pricer, explain(**pricer), *choices, {}); !s)
      return report_errors(s.error());
  }
  if (report.error) {
    flush_output();
    report_errors({*report.error});
    return exit_no;
  }
  say_next("simulate", o.scenario);
  return exit_done;
}

}  // namespace

void add_plan(CommandLine& line) {
  auto o = std::make_shared<PlanArguments>();
  const Command sub = line.add_command(
      "plan", "resolve a scenario, say what memory each phase needs, and which layouts of these GPUs are best");
  add_scenario_options(sub, o->scenario);
  const Option resolved = sub.flag("--resolved", o->resolved, "print the scenario with every default and stop");
  const Option print = sub.flag("--print", o->print, "print the plan's ops and stop").excludes(resolved);
  sub.option("--phase", o->phase, "with --print: only this phase").needs(print);
  sub.option("--objective", o->objective,
             "what the best layouts are best in: seconds, tokens-per-gpu, gpu-hours, money, memory, gpus "
             "(fewest: with --gpus ?; else all use the same, and seconds decide)");
  sub.option("--headroom", o->headroom,
             "fraction of device memory that they leave free; the error of predicted bytes unless given")
      .check(finite_in(0.0, 0.99));
  sub.option("--top", o->top, "how many of them").check(whole_in(1, 100));
  sub.option("--budget", o->budget, "prices after which the search stops with a proven gap; 0: never")
      .check(whole_from(0));
  sub.flag("--details", o->details,
           "beside the answer, where bytes and seconds go; of a plan, the memory of each phase");
  const Option gpus = sub.option("--gpus", o->gpus, "?: the smallest cluster on which some layout fits, and stop")
                          .check(one_of({"?"}))
                          .excludes(print)
                          .excludes(resolved);
  const Option within = sub.option("--within", o->within,
                                   "600s, 10m, 2h: the fewest GPUs on which an iteration takes no longer, and stop")
                            .excludes(print)
                            .excludes(resolved);
  sub.option("--out", o->out, "save the plan; `run --plan` then refuses anything else")
      .excludes(gpus)
      .excludes(within)
      .excludes(resolved);
  sub.option("--html", o->html, "also write the answer as a page: layouts, memory by moment, seconds, what if")
      .excludes(gpus)
      .excludes(within)
      .excludes(print)
      .excludes(resolved);
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
