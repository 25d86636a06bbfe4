// calibrate --backend cuda: a scenario's own plan on this machine's GPU, each op between two events of the device, for
// as many ranks as the scenario has on it. On the driver's double the times are those of an interpreter: the profile
// says so, and is refused as a price.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/calibrate_samples.h"
#include "cli/output.h"
#include "cli/run_cuda.h"
#include "cli/streams.h"
#include "planner/cost/cost_model.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "trace/compare.h"
#include "trace/merge.h"
#include "trace/summary.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/launch_time.h"
#endif

namespace hotbunk {

#ifdef HOTBUNK_CUDA
namespace {

/// This rank's timings as text, without the first iteration's.
std::string rank_samples(const Job& job, Rank rank, const std::vector<cuda::DeviceTiming>& timings) {
  const CostModel model(hardware_from_datasheet(job.scenario.cluster), job.scenario.cluster);
  Samples samples;
  for (const cuda::DeviceTiming& t : timings) {
    if (t.step == cold_step) continue;
    // What the host computes is priced by its memory's rate, and no kernel of the device.
    if (!is_memory(t.op->kind) && t.op->kind != OpKind::feed && job.plan.stream(t.op->stream).kind == StreamKind::host)
      continue;
    const double seconds = 1e-9 * static_cast<double>(std::max<std::int64_t>(1, t.nanoseconds));
    const auto m = model.measurement_of(job.plan, rank, *t.op, t.sizes, seconds);
    if (!m) continue;
    Sample& s = samples[key_of(*m)];
    s.at = *m;
    s.seconds.push_back(seconds);
  }
  return text_of(samples);
}

/// The mean of each, as means add up to a phase. A collective's kernel also waits for its peers, which the simulator
/// adds: of these the time that a quarter of the samples stay below.
std::vector<Measurement> reduce(const Samples& samples) {
  constexpr double unwaiting = 0.25;
  std::vector<Measurement> out;
  double shortest = std::numeric_limits<double>::infinity();
  for (const auto& [key, s] : samples) {
    Measurement m = s.at;
    m.seconds = is_collective(m.op) ? quantile(s.seconds, unwaiting) : mean(s.seconds);
    if (!is_collective(m.op) && !is_mapping(m.op) && m.op != "feed" && m.op != "fetch")
      shortest = std::min(shortest, m.seconds);
    out.push_back(m);
  }
  // What a kernel takes that has next to nothing to do.
  if (!out.empty()) out.insert(out.begin(), {.op = "launch", .seconds = std::min(shortest, 1e-3)});
  return out;
}

int conclude(const CalibrateArguments& o, const Job& job, const Samples& samples, const std::string& device,
             int threads, double launch_seconds, const Trace& measured, const std::vector<SampleLengths>& lengths) {
  Hardware hardware = hardware_from_datasheet(job.scenario.cluster);
  hardware.name = job.scenario.cluster.gpu.name;
  const auto products = cuda_products(o.backend, "");
  hardware.source = fmt::format(
      "{}hotbunk calibrate --backend {} on {}, {} ranks, host threads of each: {}, scenario {}, matrix products: {}",
      o.backend == "cuda-fake" ? std::string(double_profile) + ": " : "", o.backend, device, job.plan.num_ranks(),
      threads, job.scenario.name, products ? *products : "");
  hardware.measured_ranks_per_device = job.scenario.cluster.ranks_per_device;
  hardware.measurements = reduce(samples);
  hardware.launch = {launch_seconds, "measured: the host's time per cuLaunchKernel, mean of 500 in a row"};
  if (auto s = write_file_atomic(o.out, to_yaml(hardware)); !s) return report_errors(s.error());
  const auto simulated =
      simulate_job(job, hardware,
                   {.lengths = [&](std::int32_t step) { return lengths[static_cast<std::size_t>(step - 1)]; },
                    .span_steps = 0,
                    .enforce_capacity = false,
                    .every_op = true});
  if (!simulated) return report_errors(simulated.error());
  const Comparison c = compare_traces(job.plan, *simulated, measured);
  if (o.scenario.json) {
    const nlohmann::ordered_json document = {{"schema", "hotbunk.calibrate/1"},
                                             {"profile", o.out},
                                             {"device", device},
                                             {"measurements", hardware.measurements.size()},
                                             {"launch_seconds", launch_seconds},
                                             {"mean_error", c.mean_error},
                                             {"max_error", c.max_error},
                                             {"iteration_error", c.iteration_error}};
    print_document(json_text(document, 1));
    return exit_done;
  }
  print_gemms(hardware.measurements);
  print_collectives(hardware.measurements);
  print_result(fmt::format("A launch takes {:.2f} us of the host, {:.2f} us of the device at least\n",
                           1e6 * launch_seconds, 1e6 * hardware.measurements.front().seconds));
  print_result(fmt::format("\nThe profile tried on the run it came from:\n{}", render_comparison(c, use_colour())));
  print_result(fmt::format("Profile: {} ({} measurements; {})\n", printable_line(o.out), hardware.measurements.size(),
                           hardware_evidence_line()));
  flush_output();
  say_next("simulate", o.scenario, "--set " + shell_quoted("cluster.calibration=" + o.out));
  return exit_done;
}

int calibrate_rank(const CalibrateArguments& o, const Job& job, World& world, const MakeBackend& make) {
  std::vector<SampleLengths> lengths;
  const auto threads = static_cast<int>(world.cores());
  DriverOptions listening;
  listening.threads = threads;
  listening.on_samples = [&](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  auto driver = make_training_driver(job.plan, job.scenario, listening);
  if (!driver) return report_errors(driver.error());
  const auto backend = make(**driver, *o.steps, threads);
  const auto trace =
      execute(job.plan, *backend, **driver, {.steps = *o.steps, .local_ranks = {static_cast<Rank>(world.rank())}});
  if (!trace) {
    world.watch().announce_failure(trace.error().front().message);
    return report_errors(trace.error());
  }
  const auto& on_device = dynamic_cast<const cuda::CudaBackend&>(*backend);
  const auto samples = gather_strings_at_first(world, "samples",
                                               rank_samples(job, static_cast<Rank>(world.rank()), on_device.timings()));
  const auto traces = gather_strings_at_first(world, "traces", pack_trace(*trace));
  int code = exit_done;
  if (world.rank() == 0) {
    const cuda::Context& context = on_device.context();
    code = conclude(o, job, merge(samples), context.device_name(), threads, cuda::launch_seconds(context),
                    merge_traces(traces), lengths);
  }
  world.leave();
  return code;
}

}  // namespace

int calibrate_on_cuda(CalibrateArguments o) {
  constexpr std::int32_t usual_steps = 8;
  int code = exit_done;
  ScenarioOptions scenario = o.scenario;
  if (!o.steps) o.steps = usual_steps;
  scenario.sets.push_back(fmt::format("steps={}", *o.steps));
  const auto job = load_job(scenario, code);
  if (!job) return code;
  if (const auto error = fit_error(*job)) return report_errors({*error});
  if (auto s = check_writable(o.out); !s) return report_errors(s.error());
  auto env = launch_env(process_env);
  if (!env) return report_errors(env.error());
  WorldOptions world;
  world.timeout_seconds = job->scenario.run.timeout_s;
  const auto ended = run_on_cuda({.fake = o.backend == "cuda-fake",
                                  .fake_bytes = fake_device_bytes(*job, *env && (*env)->world_size > 1),
                                  .keep_timings = true,
                                  .ranks = job->plan.num_ranks(),
                                  .env = *env,
                                  .world = world},
                                 [&](World& w, const MakeBackend& make) {
                                   try {
                                     return calibrate_rank(o, *job, w, make);
                                   } catch (const RuntimeFailure& e) {
                                     return report_errors({stopped(e.what())});
                                   }
                                 });
  return ended ? *ended : report_errors(ended.error());
}

#else

int calibrate_on_cuda(CalibrateArguments) {
  return report_errors(run_on_cuda({}, [](World&, const MakeBackend&) { return 0; }).error());
}

#endif

}  // namespace hotbunk
