#include "cli/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "cli/progress.h"
#include "exec/length_driver.h"
#include "graph/plan_json.h"
#include "lowering/lower.h"
#include "reports/chrome_trace.h"
#include "reports/html.h"
#include "reports/metrics_jsonl.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "trace/static_memory.h"
#include "trace/summary.h"
#include "trace/trace_json.h"

namespace hotbunk {

void add_scenario_options(CLI::App& app, ScenarioOptions& o) {
  app.add_option("scenario", o.path, "scenario file (YAML)")->required();
  app.add_option("--set", o.sets, "override a scenario key: a.b.c=value (repeatable)")->allow_extra_args(false);
  app.add_flag("--json", o.json, "one JSON document on stdout, nothing else there");
}

int report_errors(const Diagnostics& errors) {
  std::fputs(render(errors).c_str(), stderr);
  if (errors.empty()) return exit_bad_input;
  const std::string& code = errors.front().code;
  if (code.starts_with("E6")) return exit_runtime;
  return code == "E301" || code == "E302" || code == "E310" || code == "E312" ? exit_no : exit_bad_input;
}

std::optional<Job> load_job(const ScenarioOptions& o, int& code) {
  auto scenario = load_scenario(o.path, o.sets);
  if (!scenario) {
    code = report_errors(scenario.error());
    return std::nullopt;
  }
  auto plan = lower(*scenario);
  if (!plan) {
    code = report_errors(plan.error());
    return std::nullopt;
  }
  Job job{std::move(*scenario), std::move(*plan), {}};
  job.hash = plan_hash(job.plan);
  return job;
}

namespace {

/// What would help most, from what is large at the peak.
std::string remedy(const Job& job, const std::vector<LiveBuffer>& live, std::string_view phase) {
  const Scenario& s = job.scenario;
  const std::string top = live.empty() ? "" : live.front().name;
  if (top.find("kv_cache") != std::string::npos)
    return fmt::format("lower rollout.memory_fraction (now {}) or rollout.kv_cache_tokens", s.rollout.memory_fraction);
  if (top.find("logits") != std::string::npos)
    return fmt::format(
        "set train.loss_chunk_tokens to {} (a logits chunk then takes {}), or lower train.micro_batch_tokens (now {})",
        std::max<std::int64_t>(1, s.train.micro_batch_tokens / 8),
        format_bytes(static_cast<double>(live.front().bytes) / 8), s.train.micro_batch_tokens);
  if (phase == "train" && s.train.recompute != Recompute::full)
    return "set train.recompute to full, or lower train.micro_batch_tokens";
  if (phase == "sync") return "lower sync.bucket_mib, or set train.offload to sleep";
  return "add ranks (train.layout.dp), lower train.micro_batch_tokens or rollout.memory_fraction, or use a larger "
         "device";
}

}  // namespace

std::optional<Diagnostic> fit_error(const Job& job) {
  const FitReport fit = check_fit(job.plan);
  if (fit.fits) return std::nullopt;
  const std::string phase = fit.phase >= 0 ? job.plan.phases[static_cast<std::size_t>(fit.phase)].name : "?";
  Diagnostic d{
      .code = "E301",
      .message = fmt::format("the plan does not fit: rank {} needs {} of {} {} memory in phase {}", fit.worst_rank,
                             format_bytes(static_cast<double>(fit.mapped_peak_bytes + fit.overhead_bytes)),
                             format_bytes(static_cast<double>(fit.capacity_bytes)), name_of(fit.space), phase),
      .where = {},
      .notes = {},
      .help = {}};
  const auto live = live_at_peak(job.plan, fit.worst_rank, fit.phase);
  std::string largest;
  for (std::size_t i = 0; i < std::min<std::size_t>(4, live.size()); ++i)
    largest += fmt::format("{}{} {} ({})", i ? ", " : "largest at the peak: ", live[i].name,
                           format_bytes(static_cast<double>(live[i].bytes)), name_of(live[i].category));
  if (!largest.empty()) d.notes.push_back(largest);
  d.notes.push_back(fmt::format("short by {}", format_bytes(static_cast<double>(
                                                   fit.mapped_peak_bytes + fit.overhead_bytes - fit.capacity_bytes))));
  d.help = fit.space == Space::host ? "raise cluster.host_memory_gib, or set train.offload to none"
                                    : remedy(job, live, phase);
  return d;
}

Result<Hardware> hardware_of(const Scenario& s) { return hardware_for(s.cluster, catalog_root()); }

Result<Trace> simulate_job(const Job& job, const Hardware& hardware, const SimulateOptions& options) {
  std::optional<std::vector<SampleLengths>> recorded;
  if (!options.recorded_lengths.empty()) {
    auto read = read_lengths(options.recorded_lengths);
    if (!read) return tl::unexpected(read.error());
    recorded = std::move(*read);
  }
  auto driver = LengthDriver::create(job.plan, job.scenario, std::move(recorded));
  if (!driver) return tl::unexpected(driver.error());
  const CostModel model(hardware, job.scenario.cluster);
  const ModelCost cost(model);
  SimOptions sim;
  sim.enforce_capacity = options.enforce_capacity;
  sim.timeline.last_step = options.span_steps;
  SimBackend backend(job.scenario.cluster, cost, sim);
  RunOptions run;
  run.steps = static_cast<std::int32_t>(job.scenario.steps);
  for (Rank r = 0; r < job.plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  ProgressLine progress;
  run.on_phase = [&](std::int32_t step, std::int16_t phase) {
    progress.show([&] {
      return fmt::format("simulating step {}/{}, {}", std::clamp(step, 1, run.steps), run.steps,
                         job.plan.phases[static_cast<std::size_t>(phase)].name);
    });
  };
  return execute(job.plan, backend, **driver, run);
}

Status write_run_folder(const RunFolder& folder, const Job& job, const Trace& trace, const Trace* predicted,
                        const std::string& calibration) {
  const auto write = [](const std::filesystem::path& path, const std::string& text) {
    return write_file_atomic(path, text);
  };
  Scenario scenario = job.scenario;
  std::string& profile =
      scenario.cluster.calibration;  // of the catalogue, or a path: then the folder works from anywhere
  std::error_code ignored;
  if (!profile.empty() && !std::filesystem::exists(catalog_root() / "profiles" / (profile + ".yaml"), ignored))
    profile = std::filesystem::absolute(profile, ignored).string();
  if (auto s = write(folder.scenario(), resolved_yaml(scenario)); !s) return s;
  if (auto s = write(folder.plan(), plan_to_json(job.plan)); !s) return s;
  if (auto s = write(folder.trace(), trace_to_json(trace, job.hash)); !s) return s;
  if (predicted)
    if (auto s = write(folder.simulated_trace(), trace_to_json(*predicted, job.hash)); !s) return s;
  if (auto s = write(folder.summary(), summarize(job.plan, job.scenario, trace).dump(1) + "\n"); !s) return s;
  if (auto s = write(folder.metrics(), metrics_jsonl(job.plan, job.scenario, trace)); !s) return s;
  if (auto s = write(folder.chrome_trace(), chrome_trace(job.plan, trace)); !s) return s;
  std::vector<SampleLengths> lengths;
  if (std::filesystem::exists(folder.lengths())) {
    auto read = read_lengths(folder.lengths());
    if (!read) return tl::unexpected(read.error());
    lengths = std::move(*read);
  } else if (job.plan.phase_index("rollout") >= 0) {  // a simulation: what it drew
    for (std::int32_t step = 1; step <= job.scenario.steps; ++step) lengths.push_back(draw_lengths(job.scenario, step));
  }
  return write(folder.report(), html_report({.plan = job.plan,
                                             .scenario = job.scenario,
                                             .trace = trace,
                                             .predicted = predicted,
                                             .calibration = calibration,
                                             .lengths = std::move(lengths)}));
}

Result<LoadedRun> read_run_folder(const RunFolder& folder) {
  auto scenario = load_scenario(folder.scenario());
  if (!scenario) return tl::unexpected(scenario.error());
  auto plan_text = read_file(folder.plan());
  if (!plan_text) return tl::unexpected(plan_text.error());
  auto plan = plan_from_json(*plan_text, folder.plan().string());
  if (!plan) return tl::unexpected(plan.error());
  auto trace_text = read_file(folder.trace(), std::int64_t{8} << 30);
  if (!trace_text) return tl::unexpected(trace_text.error());
  auto trace = trace_from_json(*trace_text, folder.trace().string());
  if (!trace) return tl::unexpected(trace.error());
  if (auto s = trace_fits_plan(trace->trace, *plan, folder.trace().string()); !s) return tl::unexpected(s.error());
  LoadedRun run{{std::move(*scenario), std::move(*plan), {}}, std::move(trace->trace)};
  run.job.hash = plan_hash(run.job.plan);
  return run;
}

}  // namespace hotbunk
