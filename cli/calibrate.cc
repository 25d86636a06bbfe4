// calibrate: times every kind of op at the sizes that a scenario uses, on as many ranks as it has and all of them busy,
// and writes a hardware profile. What is measured is what a run pays: the same plan, the same kernels, the same
// streams.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/gather.h"
#include "base/check.h"
#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "lowering/lower.h"
#include "planner/cost_model.h"
#include "rl/sft_driver.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "trace/compare.h"
#include "trace/summary.h"
#include "trace/text_table.h"
#include "trace/trace_json.h"

namespace hotbunk {
namespace {

struct Options {
  ScenarioOptions scenario;
  std::string out = "calibration.yaml";
  std::int32_t steps = 4;
};

/// Seconds of all runs of one op at one size.
struct Sample {
  Measurement at;
  std::vector<double> seconds;
};
using Samples = std::map<std::string, Sample>;

std::string key_of(const Measurement& m) {
  return fmt::format("{} {} {} {} {}", m.op, name_of(m.dtype), m.at[0], m.at[1], m.at[2]);
}

constexpr std::int32_t first_counted_step = 2;  // the first iteration touches memory and builds primitives
const char* const gap_key = "launch";

/// This rank's timings as text: [op, dtype, a, b, c, [seconds…]] rows. Gaps between ops that follow one another on the
/// compute stream are what starting an op costs.
std::string rank_samples(const Job& job, const CostModel& model, Rank rank, std::vector<TimedOp> timings) {
  Samples samples;
  const auto add = [&](const Measurement& m) {
    Sample& s = samples[key_of(m)];
    s.at = m;
    s.seconds.push_back(m.seconds);
  };
  std::stable_sort(timings.begin(), timings.end(),
                   [](const TimedOp& a, const TimedOp& b) { return a.start_ns < b.start_ns; });
  const TimedOp* before = nullptr;
  for (const TimedOp& t : timings) {
    if (t.step < first_counted_step) continue;
    if (const auto m =
            model.measurement_of(job.plan, rank, *t.op, t.sizes,
                                 1e-9 * static_cast<double>(std::max<std::int64_t>(1, t.end_ns - t.start_ns))))
      add(*m);
    if (t.stream != StreamId::compute || t.op->kind == OpKind::map || t.op->kind == OpKind::unmap) continue;
    if (before && before->phase == t.phase && before->step == t.step)
      add({.op = gap_key,
           .seconds = 1e-9 * static_cast<double>(std::max<std::int64_t>(1, t.start_ns - before->end_ns))});
    before = &t;
  }
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [key, s] : samples)
    rows.push_back({s.at.op, name_of(s.at.dtype), s.at.at[0], s.at.at[1], s.at.at[2], s.seconds});
  return rows.dump();
}

Samples merge(const std::vector<std::string>& ranks) {
  Samples all;
  for (const std::string& text : ranks)
    for (const auto& row : nlohmann::json::parse(text)) {
      Measurement m{.op = row[0],
                    .dtype = dtype_from(row[1].get<std::string>()).value_or(DType::f32),
                    .at = {row[2], row[3], row[4]},
                    .seconds = 0};
      Sample& s = all[key_of(m)];
      s.at = m;
      for (double x : row[5]) s.seconds.push_back(x);
    }
  return all;
}

double quantile(std::vector<double> values, double q) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

bool is_collective(const std::string& op) {
  for (int k = 0; k < num_op_kinds; ++k)
    if (op == name_of(static_cast<OpKind>(k))) return is_communication(static_cast<OpKind>(k));
  return false;
}

/// A collective's time on a rank includes the wait for the last participant, which the simulator adds itself; the ranks
/// that came late waited least, so the lower quarter is the transfer. Everything else: the mean, as means add up to a
/// phase.
std::vector<Measurement> reduce(const Samples& samples) {
  const auto gap = samples.find(gap_key + std::string(" fp32 1 1 1"));
  const double launch = gap == samples.end() ? 0.0 : mean(gap->second.seconds);
  std::vector<Measurement> out{{.op = gap_key, .seconds = std::max(launch, 1e-9)}};
  for (const auto& [key, s] : samples) {
    if (s.at.op == gap_key) continue;
    Measurement m = s.at;
    const bool moves = is_collective(m.op) || m.op == "h2d" || m.op == "d2h" || m.op == "map" || m.op == "unmap";
    m.seconds = is_collective(m.op) ? quantile(s.seconds, 0.25) : mean(s.seconds);
    if (!moves) m.seconds += launch;  // profiles state kernels with their start-up
    out.push_back(m);
  }
  return out;
}

/// nccl-tests' columns: algbw = size / time; busbw = algbw * 2(W-1)/W for all-reduce, (W-1)/W for gather and scatter.
void print_collectives(const std::vector<Measurement>& measurements) {
  TextTable table({"collective", "ranks", "size (B)", "time (us)", "algbw (GB/s)", "busbw (GB/s)"});
  for (const Measurement& m : measurements) {
    if (!is_collective(m.op) || m.at[2] <= 1.0) continue;
    const double algbw = m.at[2] / m.seconds / 1e9, share = (m.at[0] - 1) / m.at[0];
    table.add({m.op, fmt::format("{:.0f}", m.at[0]), fmt::format("{:.0f}", m.at[2]),
               fmt::format("{:.1f}", m.seconds * 1e6), fmt::format("{:.3f}", algbw),
               fmt::format("{:.3f}", algbw * (m.op == "all_reduce" ? 2 * share : share))});
  }
  if (!table.empty()) fmt::print("Collectives\n{}\n", table.str());
}

void print_gemms(const std::vector<Measurement>& measurements) {
  TextTable table({"product", "dtype", "m", "n", "k", "time (us)", "GF/s"}, 2);
  for (const Measurement& m : measurements)
    if (m.op.starts_with("linear"))
      table.add({m.op, std::string(name_of(m.dtype)), fmt::format("{:.0f}", m.at[0]), fmt::format("{:.0f}", m.at[1]),
                 fmt::format("{:.0f}", m.at[2]), fmt::format("{:.1f}", m.seconds * 1e6),
                 fmt::format("{:.2f}", 2e-9 * m.at[0] * m.at[1] * m.at[2] / m.seconds)});
  fmt::print("Matrix products on one rank, all ranks busy\n{}\n", table.str());
}

/// On rank 0: the profile, written, printed, and tried on the run that it came from.
int conclude(const Options& o, const Job& job, const Samples& samples, const Trace& measured,
             const std::vector<SampleLengths>& lengths) {
  Hardware hardware = hardware_from_datasheet(job.scenario.cluster);
  hardware.name = job.scenario.cluster.gpu.name;
  hardware.source = fmt::format("hotbunk calibrate on {} cores, {} ranks, scenario {}", local_machine().cores,
                                job.plan.num_ranks(), job.scenario.name);
  hardware.measured_ranks_per_device = job.scenario.cluster.ranks_per_device;
  hardware.measurements = reduce(samples);
  if (auto s = write_file_atomic(o.out, to_yaml(hardware)); !s) return report_errors(s.error());
  const std::filesystem::path recorded = o.out + ".lengths.jsonl";
  if (auto s = write_lengths(recorded, lengths); !s) return report_errors(s.error());
  const auto simulated =
      simulate_job(job, hardware, {.recorded_lengths = recorded, .span_steps = 0, .enforce_capacity = false});
  std::filesystem::remove(recorded);
  if (!simulated) return report_errors(simulated.error());
  const Comparison c = compare_traces(job.plan, *simulated, measured);
  if (o.scenario.json) {
    const nlohmann::ordered_json document = {
        {"schema", "hotbunk.calibrate/1"}, {"profile", o.out},         {"measurements", hardware.measurements.size()},
        {"mean_error", c.mean_error},      {"max_error", c.max_error}, {"iteration_error", c.iteration_error}};
    fmt::print("{}\n", document.dump(1));
    return exit_done;
  }
  print_gemms(hardware.measurements);
  print_collectives(hardware.measurements);
  fmt::print("Starting an op: {:.1f} us\n\nThe profile tried on the run it came from:\n{}",
             hardware.measurements.front().seconds * 1e6, render_comparison(c, use_colour()));
  fmt::print("Profile: {} ({} measurements)\nNext: hotbunk simulate {} --set cluster.calibration={}\n", o.out,
             hardware.measurements.size(), o.scenario.path, o.out);
  return exit_done;
}

int calibrate_rank(const Options& o, const Job& job, World& world) {
  auto driver = make_training_driver(job.plan, job.scenario, {});
  if (!driver) return report_errors(driver.error());
  CpuOptions cpu;
  cpu.compute_threads = std::max(1, static_cast<int>(local_machine().cores) / std::max(1, world.size()));
  cpu.span_steps = o.steps;
  CpuBackend backend(world, **driver, cpu);
  // The timings must be taken before the trace ends the device: a backend that does both when asked for the trace.
  struct Harvest final : Backend {
    Harvest(CpuBackend& b) : inner(b) {}
    Capability supports(const Op& op) const override { return inner.supports(op); }
    Result<std::vector<std::unique_ptr<Device>>> open(const Plan& p, std::span<const Rank> l) override {
      return inner.open(p, l);
    }
    Result<Trace> take_trace() override {
      timings = inner.timings();
      return inner.take_trace();
    }
    CpuBackend& inner;
    std::vector<TimedOp> timings;
  } harvest(backend);
  const auto trace =
      execute(job.plan, harvest, **driver, {.steps = o.steps, .local_ranks = {static_cast<Rank>(world.rank())}});
  if (!trace) {
    world.watch().announce_failure(trace.error().front().message);
    return report_errors(trace.error());
  }
  const CostModel model(hardware_from_datasheet(job.scenario.cluster), job.scenario.cluster);
  const auto samples = gather_strings(
      world, "samples", rank_samples(job, model, static_cast<Rank>(world.rank()), std::move(harvest.timings)));
  const auto traces = gather_strings(world, "traces", trace_to_json(*trace, job.hash));
  int code = exit_done;
  if (world.rank() == 0) {
    std::vector<Trace> parts;
    for (const std::string& text : traces) {
      auto part = trace_from_json(text, "rank's trace");
      HB_CHECK(part.has_value(), "{}", render(part.error()));
      parts.push_back(std::move(part->trace));
    }
    code = conclude(o, job, merge(samples), merge_traces(parts), (*driver)->trained_lengths());
  }
  world.leave();
  return code;
}

int run(const Options& o) {
  int code = exit_done;
  ScenarioOptions scenario = o.scenario;
  scenario.sets.push_back(fmt::format("steps={}", o.steps));
  auto job = load_job(scenario, code);
  if (!job) return code;
  if (const auto error = fit_error(*job)) return report_errors({*error});
  if (auto s = check_writable(o.out); !s) return report_errors(s.error());
  if (job->plan.num_ranks() == 1) {
    World world;
    return calibrate_rank(o, *job, world);
  }
  std::fflush(stdout);
  const LaunchResult result = fork_ranks(job->plan.num_ranks(), [&](const LaunchEnv& env) {
    World world(env);
    const int rank_code = calibrate_rank(o, *job, world);
    std::fflush(stdout);
    return rank_code;
  });
  if (!result.message.empty()) std::fprintf(stderr, "error[E603]: %s\n", result.message.c_str());
  return result.exit_code;
}

}  // namespace

void add_calibrate(CLI::App& app, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("calibrate", "time a scenario's ops on this machine and write a hardware profile");
  add_scenario_options(*sub, o->scenario);
  sub->add_option("--out", o->out, "the profile (name it in cluster.calibration)");
  sub->add_option("--steps", o->steps, "iterations to time; the first is not counted")->check(CLI::Range(2, 1000));
  sub->callback([o, &action] { action = [o] { return run(*o); }; });
}

}  // namespace hotbunk
