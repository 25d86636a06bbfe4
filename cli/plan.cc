#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "graph/plan_json.h"
#include "graph/print.h"
#include "planner/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "trace/static_memory.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

struct Options {
  ScenarioOptions scenario;
  bool resolved = false, print = false;
  std::string phase, out;
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

void print_memory(const Job& job, const FitReport& fit) {
  const RankMemory memory = static_memory(job.plan, fit.worst_rank);
  fmt::print("{}: {} ranks in {} classes, plan {}\n\n", job.scenario.name, job.plan.num_ranks(),
             job.plan.programs.size(), job.hash);
  fmt::print("Device memory of rank {}, live bytes at each phase's peak (MiB)\n", fit.worst_rank);
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
  fmt::print("{}\n", table.str());
  fmt::print("Largest tensors at the peak:\n");
  const auto live = live_at_peak(job.plan, fit.worst_rank);
  for (std::size_t i = 0; i < std::min<std::size_t>(5, live.size()); ++i)
    fmt::print("  {:>12}  {:<14} {}\n", format_bytes(static_cast<double>(live[i].bytes)), name_of(live[i].category),
               live[i].name);
  if (memory.host.mapped_peak_bytes > 0)
    fmt::print("Host memory per rank: {}\n", format_bytes(static_cast<double>(memory.host.mapped_peak_bytes)));
}

/// What nothing lowers yet is priced in closed form; the answer says so.
int price(const Options& o, const Scenario& scenario, const std::vector<std::string>& reasons) {
  const auto pricer = ScenarioPricer::make(scenario, catalog_root());
  if (!pricer) return report_errors(pricer.error());
  const Explanation e = explain(**pricer);
  fmt::print("{}\n", o.scenario.json ? to_json(e) : render(e));
  std::fflush(stdout);
  for (const std::string& why : reasons) fmt::print(stderr, "note: priced, not lowered to a plan: {}\n", why);
  if (!o.scenario.json) fmt::print(stderr, "Next: hotbunk explain {} --search\n", o.scenario.path);
  return e.price.fits ? exit_done : exit_no;
}

int run(const Options& o) {
  int code = exit_done;
  if (o.resolved) {
    auto scenario = load_scenario(o.scenario.path, o.scenario.sets);
    if (!scenario) return report_errors(scenario.error());
    fmt::print("{}", resolved_yaml(*scenario));
    return exit_done;
  }
  {
    const auto scenario = load_scenario(o.scenario.path, o.scenario.sets);
    if (!scenario) return report_errors(scenario.error());
    if (const auto reasons = unsupported_to_execute(*scenario); !reasons.empty() && !o.print && o.out.empty())
      return price(o, *scenario, reasons);
  }
  const auto job = load_job(o.scenario, code);
  if (!job) return code;
  if (!o.out.empty())
    if (auto s = write_file_atomic(o.out, plan_to_json(job->plan)); !s) return report_errors(s.error());
  if (o.print) {
    fmt::print("{}", print_plan(job->plan, {.phase = o.phase}));
    return exit_done;
  }
  const FitReport fit = check_fit(job->plan);
  const auto error = fit_error(*job);
  if (o.scenario.json) fmt::print("{}\n", plan_document(*job, fit, !error).dump(1));
  else print_memory(*job, fit);
  if (error) {
    std::fflush(stdout);
    report_errors({*error});
    return exit_no;
  }
  if (!o.scenario.json) {
    if (job->plan.device_capacity_bytes > 0)
      fmt::print("\nIt fits: {} of {} ({:.1f} %)\n",
                 format_bytes(static_cast<double>(fit.mapped_peak_bytes + fit.overhead_bytes)),
                 format_bytes(static_cast<double>(fit.capacity_bytes)),
                 100.0 * static_cast<double>(fit.mapped_peak_bytes + fit.overhead_bytes) /
                     static_cast<double>(fit.capacity_bytes));
    fmt::print("Next: hotbunk simulate {}\n", o.scenario.path);
  }
  return exit_done;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("plan", "resolve a scenario, lower it, and say what memory each phase needs");
  add_scenario_options(*sub, o->scenario);
  sub->add_flag("--resolved", o->resolved, "print the scenario with every default and stop");
  sub->add_flag("--print", o->print, "print the plan's ops and stop");
  sub->add_option("--phase", o->phase, "with --print: only this phase");
  sub->add_option("--out", o->out, "save the plan; `run --plan` then refuses anything else");
  sub->callback([o, &action] { action = [o] { return run(*o); }; });
}

}  // namespace hotbunk
