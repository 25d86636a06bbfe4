// calibrate: times every kind of op at the sizes that a scenario uses, on as many ranks as it has and all of them busy,
// and writes a hardware profile. What is measured is what a run pays: the same plan, the same kernels, the same
// streams.
#include <fmt/format.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/cores.h"
#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/calibrate_samples.h"
#include "cli/command.h"
#include "cli/product_choice.h"
#include "cli/streams.h"
#include "lowering/lower.h"
#include "planner/cost/cost_model.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "runtime/stream_thread.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "trace/compare.h"
#include "trace/merge.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

// Samples that are no op's: CPU time between two ops of a stream, of the host per call and per block.
const char *const gap_key = "launch", *const call_key = "call", *const decision_key = "decision";

double seconds_of(std::int64_t ns) { return 1e-9 * static_cast<double>(std::max<std::int64_t>(1, ns)); }

/// What one reading of a thread's CPU clock takes, a system call.
std::int64_t cpu_clock_ns() {
  constexpr int readings = 2000;
  timespec first{}, t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &first);
  for (int i = 0; i < readings; ++i) ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return ((t.tv_sec - first.tv_sec) * 1'000'000'000 + t.tv_nsec - first.tv_nsec) / readings;
}

/// This rank's timings as text (text_of). All are CPU time of the thread that
/// did the work: waiting for a core, for another stream or for a peer is what the simulator adds. Only kernels of a
/// team of threads are timed by the clock on the wall: their thread sleeps while others of the team work.
std::string rank_samples(const Job& job, const CostModel& model, Rank rank, int compute_threads,
                         std::vector<TimedOp> timings, const std::vector<HostStretch>& host) {
  const bool one_thread = job.plan.num_ranks() == 1;  // all streams run inside the calls
  if (one_thread)
    std::stable_sort(timings.begin(), timings.end(),
                     [](const TimedOp& a, const TimedOp& b) { return a.start_ns < b.start_ns; });
  Samples samples;
  const auto add = [&](const Measurement& m, bool first = false) {
    Sample& s = samples[key_of(m)];
    s.at = m;
    (first ? s.first : s.seconds).push_back(m.seconds);
  };
  std::set<std::string> used;
  const std::int64_t clock_ns = cpu_clock_ns();  // every interval holds one reading of the clock
  const TimedOp* before = nullptr;               // timings come thread by thread, in order
  for (const TimedOp& t : timings) {
    const bool on_host = t.op->kind == OpKind::map || t.op->kind == OpKind::unmap;
    if (before && !on_host && (one_thread || before->stream == t.stream) && t.step != cold_step)
      add({.op = gap_key, .seconds = seconds_of(t.cpu_start_ns - before->cpu_end_ns - clock_ns)});
    before = on_host ? nullptr : &t;
    const bool team = compute_threads > 1 && t.stream == lead_stream && !on_host && !is_communication(t.op->kind);
    const std::int64_t ns = team ? t.end_ns - t.start_ns : t.cpu_end_ns - t.cpu_start_ns - clock_ns;
    const auto m = model.measurement_of(job.plan, rank, *t.op, t.sizes, seconds_of(ns));
    if (!m) continue;
    const bool first = model.kernel_size(*t.op, t.sizes) && used.insert(key_of(*m)).second;
    if (t.step != cold_step) add(*m, first);
  }
  for (const HostStretch& h : host) {
    if (h.step <= cold_step || h.calls == 0) continue;
    add({.op = decision_key, .seconds = seconds_of(h.decide_ns)});
    add({.op = call_key, .seconds = seconds_of(h.issue_ns) / static_cast<double>(h.calls)});
  }
  return text_of(samples);
}

/// Seconds from the moment a stream records an event until another one that slept on it works.
struct HandOver {
  double wake = 0.0, thread_switch = 0.0;  // on an idle core; on the one that the first stream leaves
};

/// Two streams that wait for each other in turn, as a plan's streams do. The median of some rounds: other work on the
/// machine disturbs a few.
double measure_exchange() {
  constexpr int rounds = 9, exchanges = 500;
  StreamThread a("calibrate a"), b("calibrate b");
  const StreamEvent from_a, from_b;
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < exchanges; ++i) {
      a.record(from_a);
      b.wait(from_a);
      b.record(from_b);
      a.wait(from_b);
    }
    a.sync();
    b.sync();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    seconds.push_back(took.count() / (2 * exchanges));
  }
  return quantile(seconds, 0.5);
}

/// What a rank's first product of a size takes more than the next ones, mean over the sizes that came again.
double first_use_of(const Samples& samples) {
  double more = 0.0, num = 0.0;
  for (const auto& [key, s] : samples) {
    if (s.first.empty() || s.seconds.empty()) continue;
    const auto firsts = static_cast<double>(s.first.size());
    more += firsts * (mean(s.first) - mean(s.seconds));
    num += firsts;
  }
  return num > 0.0 ? std::max(0.0, more / num) : 0.0;
}

/// The mean of each, as means add up to a phase; with what a stream's thread spends around every op. A size that never
/// came again is taken to be faster by the mean first use, and to take a tenth of what it took at least.
std::vector<Measurement> reduce(const Samples& samples, double launch) {
  const double first_use = first_use_of(samples);
  std::vector<Measurement> out{{.op = gap_key, .seconds = launch}};
  for (const auto& [key, s] : samples) {
    if (s.at.op == gap_key || s.at.op == call_key || s.at.op == decision_key) continue;
    Measurement m = s.at;
    const double steady =
        s.seconds.empty() ? std::max(mean(s.first) - first_use, 0.1 * mean(s.first)) : mean(s.seconds);
    m.seconds = steady + (is_mapping(m.op) ? 0.0 : launch);
    out.push_back(m);
  }
  return out;
}

HandOver measure_hand_over() {
  HandOver out{.wake = measure_exchange()};
  cpu_set_t allowed, one;  // threads inherit it
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {out.wake, out.wake};
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
  ::sched_setaffinity(0, sizeof one, &one);
  out.thread_switch = measure_exchange();
  ::sched_setaffinity(0, sizeof allowed, &allowed);
  return out;
}

double mean_of(const Samples& samples, const char* op) {
  const auto found = samples.find(key_of({.op = op}));
  return found == samples.end() ? 1e-9 : mean(found->second.seconds);
}

/// What threads cost, where streams are threads: with one rank they run inside the calls.
void add_threads(Hardware& h, const Samples& samples, const HandOver& hand_over) {
  const auto cores = static_cast<double>(local_machine().cores);
  h.cores = {cores, "affinity and cgroup quota of the calibrating process"};
  const char* exchange = "measured: two streams that wait for each other's events in turn, median of 9 x 1000";
  h.wake = {hand_over.wake, exchange};
  h.thread_switch = {hand_over.thread_switch, std::string(exchange) + ", both on one core"};
  h.call = {mean_of(samples, call_key), "measured: CPU time of the calling thread per op, record and wait"};
  h.first_use = {first_use_of(samples), "measured: a rank's first product of a size against its next ones"};
  h.decision = {mean_of(samples, decision_key),
                "measured: CPU time of the calling thread from a sync to its next call"};
}

/// Tries what a change of threads takes in the run itself, where it empties caches and other ranks' threads are in the
/// way, against what two streams alone measured: the multiple under which the phases of `measured` come out closest.
/// E-coded where a simulation does not end.
Status fit_thread_switch(Hardware& h, const std::function<Result<Trace>(const Hardware&)>& simulated, const Job& job,
                         const Trace& measured) {
  const double alone = h.thread_switch.value;
  double best = 1.0, least = std::numeric_limits<double>::infinity();
  for (const double multiple : {1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0}) {
    h.thread_switch.value = multiple * alone;
    const auto trace = simulated(h);
    if (!trace) return fail(trace.error());
    if (const double error = compare_traces(job.plan, *trace, measured).mean_error; error < least)
      least = error, best = multiple;
  }
  h.thread_switch.value = best * alone;
  h.thread_switch.source += fmt::format("; times {}: what the calibrating run's phases fit best", best);
  return {};
}

/// How many cores other programs kept busy while ops were timed, and whether they disturbed the timing.
class OtherPrograms {
 public:
  OtherPrograms() : busy_(busy_core_seconds()), own_(own_seconds()), start_(std::chrono::steady_clock::now()) {}
  /// CPU seconds of this rank since.
  double own() const { return own_seconds() - own_; }
  /// `own`: of all ranks.
  double cores(double own) const {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start_;
    return std::max(0.0, (busy_core_seconds() - busy_ - own) / took.count());
  }

 private:
  static double own_seconds() {
    timespec t{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  double busy_, own_;
  std::chrono::steady_clock::time_point start_;
};

/// Less than a program that works now and then.
constexpr double quiet_cores = 0.15;

/// On rank 0: the profile, written, printed, and tried on the run that it came from. `others`: cores of other programs.
int conclude(const CalibrateArguments& o, const Job& job, const kernels::ProductPaths& products, const Samples& samples,
             const HandOver& hand_over, const Trace& measured, const std::vector<SampleLengths>& lengths,
             double others) {
  Hardware hardware = hardware_from_datasheet(job.scenario.cluster);
  hardware.name = job.scenario.cluster.gpu.name;
  hardware.source = fmt::format(
      "hotbunk calibrate on {} cores, {} ranks, {} iterations of scenario {}; other programs kept {:.2f} busy",
      local_machine().cores, job.plan.num_ranks(), *o.steps, job.scenario.name, others);
  if (products != kernels::rule_of_machine())
    hardware.source += fmt::format("; products of bf16: {}", kernels::text_of(products, kernels::bf16_unit()));
  hardware.measured_ranks_per_device = job.scenario.cluster.ranks_per_device;
  hardware.measurements = reduce(samples, mean_of(samples, gap_key));
  if (job.plan.num_ranks() > 1) add_threads(hardware, samples, hand_over);
  const auto simulate_with = [&](const Hardware& h) {
    return simulate_job(job, h,
                        {.lengths = [&](std::int32_t step) { return lengths[static_cast<std::size_t>(step - 1)]; },
                         .span_steps = 0,
                         .enforce_capacity = false,
                         .every_op = true});
  };
  if (job.plan.num_ranks() > 1)
    if (auto s = fit_thread_switch(hardware, simulate_with, job, measured); !s) return report_errors(s.error());
  if (auto s = write_file_atomic(o.out, to_yaml(hardware)); !s) return report_errors(s.error());
  const auto simulated = simulate_with(hardware);
  if (!simulated) return report_errors(simulated.error());
  const Comparison c = compare_traces(job.plan, *simulated, measured);
  if (others > quiet_cores)
    std::fputs(
        render(Diagnostics{{.code = "E427",
                            .message = fmt::format("the cores were not quiet: other programs kept {:.1f} of {} busy "
                                                   "while ops were timed",
                                                   others, local_machine().cores),
                            .where = {},
                            .notes = {},
                            .help = "calibrate again when they are done, or at real-time priority (chrt -f 1): "
                                    "simulated times will be off by what they took",
                            .severity = Severity::warning}})
            .c_str(),
        stderr);
  if (o.scenario.json) {
    const nlohmann::ordered_json document = {
        {"schema", "hotbunk.calibrate/1"}, {"profile", o.out},         {"measurements", hardware.measurements.size()},
        {"mean_error", c.mean_error},      {"max_error", c.max_error}, {"iteration_error", c.iteration_error},
        {"other_programs_cores", others}};
    print_document(json_text(document, 1));
    return exit_done;
  }
  print_gemms(hardware.measurements);
  print_collectives(hardware.measurements);
  print_result(fmt::format("Starting an op: {:.1f} us\n", hardware.measurements.front().seconds * 1e6));
  if (hardware.cores.value > 0)
    print_result(fmt::format(
        "{:.0f} cores; hand-over between streams {:.1f} us, on one core {:.1f} us, a call {:.2f} us, a decision {:.1f} "
        "us, a "
        "product's first use {:.0f} us\n",
        hardware.cores.value, 1e6 * hardware.wake.value, 1e6 * hardware.thread_switch.value, 1e6 * hardware.call.value,
        1e6 * hardware.decision.value, 1e6 * hardware.first_use.value));
  print_result(fmt::format("\nThe profile tried on the run it came from:\n{}", render_comparison(c, use_colour())));
  print_result(fmt::format("Profile: {} ({} measurements)\n", printable_line(o.out), hardware.measurements.size()));
  flush_output();
  say_next("simulate", o.scenario, "--set " + shell_quoted("cluster.calibration=" + o.out));
  return exit_done;
}

int calibrate_rank(const CalibrateArguments& o, const Job& job, const kernels::ProductPaths& products,
                   const HandOver& hand_over, CpuWorld& world) {
  const OtherPrograms programs;
  std::vector<SampleLengths> lengths;
  const auto threads = static_cast<int>(world.cores());
  DriverOptions listening;
  listening.threads = threads;
  listening.on_samples = [&](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  auto driver = make_training_driver(job.plan, job.scenario, listening);
  if (!driver) return report_errors(driver.error());
  CpuOptions cpu;
  cpu.compute_threads = threads;
  cpu.product_paths = products;
  cpu.span_steps = *o.steps;
  cpu.measure_cpu = true;
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
      host = inner.host_times();
      return inner.take_trace();
    }
    CpuBackend& inner;
    std::vector<TimedOp> timings;
    std::vector<HostStretch> host;
  } harvest(backend);
  const auto trace =
      execute(job.plan, harvest, **driver, {.steps = *o.steps, .local_ranks = {static_cast<Rank>(world.rank())}});
  if (!trace) {
    world.watch().announce_failure(trace.error().front().message);
    return report_errors(trace.error());
  }
  const CostModel model(hardware_from_datasheet(job.scenario.cluster), job.scenario.cluster);
  const auto samples = gather_strings_at_first(
      world, "samples",
      rank_samples(job, model, static_cast<Rank>(world.rank()), cpu.compute_threads, harvest.timings, harvest.host));
  double own = 0.0;
  for (const std::string& text : gather_strings(world, "seconds", json_text(nlohmann::json(programs.own()))))
    own += json_from<nlohmann::json>(text).get<double>();
  const double others = programs.cores(own);
  const auto traces = gather_strings_at_first(world, "traces", pack_trace(*trace));
  int code = exit_done;
  if (world.rank() == 0) {
    code = conclude(o, job, products, merge(samples), hand_over, merge_traces(traces), lengths, others);
  }
  world.leave();
  return code;
}

/// Iterations to time unless told: so many as take some seconds by the datasheet, as their means scatter less. At
/// least eight, at most 32.
Result<std::int32_t> enough_steps(const Job& job) {
  constexpr double seconds = 4.0;
  const auto trace = simulate_job(job, hardware_from_datasheet(job.scenario.cluster),
                                  {.lengths = {}, .span_steps = 0, .enforce_capacity = false});
  if (!trace) return fail(trace.error());
  const double iteration = summarize(job.plan, job.scenario, *trace).at("iteration_seconds").get<double>();
  return static_cast<std::int32_t>(std::clamp(std::ceil(seconds / std::max(iteration, 1e-9)), 8.0, 32.0));
}

int run(CalibrateArguments o) {
  int code = exit_done;
  if (o.backend != "cpu") return calibrate_on_cuda(std::move(o));
  ScenarioOptions scenario = o.scenario;
  scenario.sets.push_back(fmt::format("steps={}", o.steps.value_or(2)));
  auto job = load_job(scenario, code);
  if (!job) return code;
  if (!o.steps) {
    const auto enough = enough_steps(*job);
    if (!enough) return report_errors(enough.error());
    o.steps = *enough;
    scenario.sets.back() = fmt::format("steps={}", *o.steps);
    if (job = load_job(scenario, code); !job) return code;
  }
  if (auto s = on_this_machine(job->scenario, false); !s) return report_errors(s.error());
  if (const auto error = fit_error(*job)) return report_errors({*error});
  if (auto s = check_writable(o.out); !s) return report_errors(s.error());
  const auto asked = products_asked(process_env, kernels::bf16_unit());
  if (!asked) return report_errors(asked.error());
  // As a run of the scenario chooses, and before ranks are there.
  const kernels::ProductPaths products = choose_products(*asked, "", job->scenario, /*first=*/true);
  if (job->plan.num_ranks() == 1) {
    CpuWorld world;
    return calibrate_rank(o, *job, products, {}, world);
  }
  const HandOver hand_over = measure_hand_over();  // before the ranks start: it is about free cores
  flush_output();
  const LaunchResult result = fork_ranks(job->plan.num_ranks(), [&](const LaunchEnv& env) {
    WorldOptions options;
    options.timeout_seconds = job->scenario.run.timeout_s;
    CpuWorld world(env, options);
    const int rank_code = calibrate_rank(o, *job, products, hand_over, world);
    const Status printed = finish_output();  // this process ends without main
    return printed || rank_code != exit_done ? rank_code : report_errors(printed.error());
  });
  if (!result.message.empty()) report_errors({stopped(result.message)});
  return result.exit_code;
}

}  // namespace

void add_calibrate(CommandLine& line) {
  auto o = std::make_shared<CalibrateArguments>();
  const Command sub =
      line.add_command("calibrate", "time a scenario's ops on this machine and write a hardware profile");
  add_scenario_options(sub, o->scenario);
  sub.option("--out", o->out, "the profile (name it in cluster.calibration)");
  sub.option("--backend", o->backend,
             "cpu, cuda (this machine's GPU, timed by its own events) or cuda-fake (the driver's "
             "double: for its logic; such a profile is refused as a price)")
      .check(one_of({"cpu", "cuda", "cuda-fake"}));
  sub.option("--steps", o->steps,
             "iterations to time, the first is not counted; unless given as many as take some seconds, 8 to 32")
      .check(whole_in(2, 1000));
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
