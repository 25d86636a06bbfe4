// `run` has two lives: started by a user it becomes the launcher of local ranks; started with torchrun's, Slurm's or
// MPI's variables (also by itself) it is one rank. Long for the two, which read the same arguments and agree on them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "base/cores.h"
#include "base/file.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/product_choice.h"
#include "cli/resume.h"
#include "cli/run_console.h"
#include "cli/run_cuda.h"
#include "cli/run_facts.h"
#include "cli/run_folder.h"
#include "cli/run_input.h"
#include "cli/run_outputs.h"
#include "cli/stop_signals.h"
#include "cli/streams.h"
#include "cli/teams.h"
#include "exec/lengths.h"
#include "graph/plan_json.h"
#include "graph/print.h"
#include "reports/metrics_jsonl.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "trace/compare.h"
#include "trace/merge.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

struct RunArguments {
  ScenarioOptions scenario;
  std::string out, plan, transport, resume, backend = "cpu", fake_fault, products, attention;
  std::uint64_t fake_seed = 1;
  bool no_fit_check = false, check = false, overwrite = false, on_cpu = false;
  std::int32_t span_steps = 2;
  std::optional<std::int32_t> samples_every;
  std::int32_t threads = 0;
  std::vector<std::string> argv;
};

/// What a run goes on from, with what its user must know; nothing to resume: empty. And how its CPU ranks form
/// products.
struct Start {
  std::optional<ResumePoint> from;
  ProductsAsked asked;
  kernels::ProductPaths products = kernels::rule_of_machine();  // of bf16, where the run has some
  std::int32_t first_step() const { return from ? static_cast<std::int32_t>(from->checkpoint.state.step) + 1 : 1; }
};

void say_stop(int signal) {
  std::fprintf(stderr, "%s: stopping after this step, with a checkpoint (SIGINT ends at once)\n",
               signal == SIGINT ? "SIGINT" : "SIGTERM");
}

/// Ranks that form products in different ways, or another time, compute other bits (docs/benchmarks.md).
std::string bf16_products(const RunArguments& o, const Start& start) {
  if (o.backend == "cpu") return kernels::text_of(start.products, kernels::bf16_unit());
  const auto products = cuda_products(o.backend, o.products);
  return products ? *products : "";  // refused by check_backend
}

/// Likewise of attention's backward.
std::string attention_backward(const RunArguments& o) {
  const auto by = cuda_attention(o.backend, o.attention);
  return by ? *by : "";
}

/// oneDNN's set decides bits of fp32 too; a device's products are not its.
std::string instruction_sets(const RunArguments& o) {
  const std::string own = fmt::format("own kernels' {}", kernels::compiled_instruction_set());
  return o.backend == "cpu" ? fmt::format("oneDNN's {} and {}{}{}", kernels::onednn_instruction_set(), own,
                                          onednn_version_mark, kernels::onednn_version())
                            : own;
}

/// On CPU ranks products of bf16 count only where a run has some.
Arithmetic arithmetic(const RunArguments& o, const Start& start, const Scenario& s) {
  return {.bf16_products = o.backend != "cpu" || has_bf16(s) ? bf16_products(o, start) : "",
          .instruction_sets = instruction_sets(o)};
}

StepsWalked steps_walked(const RunArguments& o, const Job& job, const Start& start, const TrainingDriver& driver,
                         std::string hash) {
  const std::int32_t asked = driver.end_step();
  return {.first = start.first_step(),
          .last = asked > 0 ? asked : static_cast<std::int32_t>(job.scenario.steps),
          .stopped = asked > 0,
          .bf16_products = bf16_products(o, start),
          .instruction_sets = instruction_sets(o),
          .run_hash = std::move(hash)};
}

/// A resumed run goes on in its folder, unless another is named.
std::string out_of(const RunArguments& o, const Start& start) {
  return o.out.empty() && start.from && start.from->run ? start.from->run->root.string() : o.out;
}

/// `folder`: where the run is to write.
Takes takes(const RunArguments& o, const Start& start, const std::filesystem::path& folder) {
  std::error_code ec;
  if (start.from && start.from->run && std::filesystem::equivalent(folder, start.from->run->root, ec))
    return Takes::resume;
  return o.overwrite ? Takes::overwrite : Takes::unused;
}

/// A saved plan is a promise: what runs must be it, and made from the same scenario.
Status check_drift(const RunArguments& o, const Job& job) {
  if (o.plan.empty()) return {};
  const auto saved = saved_plan(o.plan);
  if (!saved) return tl::unexpected(saved.error());
  const std::string hash = plan_hash(saved->plan);
  std::vector<std::string> notes;
  if (saved->made_from.empty())
    fmt::print(stderr, "{} does not say which scenario it was made from: only the plan is compared\n",
               printable_line(o.plan));
  else notes = differences(saved->made_from, "saved", scenario_facts(job.scenario), "now");
  if (hash == job.hash && notes.empty()) return {};
  if (hash != job.hash) {
    notes.push_back(fmt::format("plan: saved {}, now {}", hash, job.hash));
    std::istringstream lines(diff_plans(saved->plan, job.plan));
    int shown = 0;
    for (std::string line; shown < 8 && std::getline(lines, line); ++shown) notes.push_back(line);
  }
  return fail(
      Diagnostic{.code = "E510",
                 .message = hash == job.hash ? "the scenario is not the one that the saved plan was made from"
                                             : "the scenario no longer gives the saved plan",
                 .where = {o.plan},
                 .notes = std::move(notes),
                 .help = "save a new plan with `hotbunk plan --out`, or run the scenario that it was made from"});
}

/// Of a rank. Every rank asks, whether it was told or not: the others wait for what it says of its cores.
int compute_threads(const RunArguments& o, World& world) {
  const auto cores = static_cast<int>(world.cores());
  return o.threads > 0 ? o.threads : cores;
}

/// The options that every rank must have been given alike.
PlanFacts shared_options(const RunArguments& o, int threads, const Start& start) {
  return {{"first step", std::to_string(start.first_step())},
          {"--transport", o.transport.empty() ? "by host" : o.transport},
          {"--check", o.check ? "true" : "false"},
          {"--backend", o.backend},
          {"--threads", fmt::format("{}", threads)},
          {"--trace-steps", fmt::format("{}", o.span_steps)},
          {"bf16 products", bf16_products(o, start)},
          {"instruction sets", instruction_sets(o)},
          {"--attention-backward", o.backend == "cpu" ? "own" : attention_backward(o)}};
}

WorldOptions world_options(const Job& job) {
  WorldOptions w;
  w.timeout_seconds = job.scenario.run.timeout_s;
  return w;
}

/// The steps of this process once more in virtual time, with the lengths that they had.
Result<Trace> simulate_run(const RunArguments& o, const Job& job, const RunFolder& folder, const Hardware& hardware,
                           const StepsWalked& walked) {
  auto lengths = lengths_of(folder, job.scenario, walked);
  if (!lengths) return fail(std::move(lengths.error()));
  return simulate_job(
      job, hardware,
      {.lengths = *lengths, .span_steps = o.span_steps, .walked = walked, .enforce_capacity = false, .every_op = true});
}

/// Rank 0's: who computed what, where a library could have.
nlohmann::ordered_json choices_json(const std::vector<LibraryChoice>& choices) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const LibraryChoice& c : choices) {
    out.push_back({{"op", c.op}, {"by", c.by}, {"times", c.times}});
    if (!c.why.empty()) out.back()["why"] = c.why;
  }
  return out;
}

/// What the run was and came to; nothing that can fail here loses what was computed: that is said, with exit code 3.
int finish_rank_0(const RunArguments& o, const Job& job, const Start& start, const RunFolder& folder,
                  const Hardware& hardware, const StepsWalked& walked, const TrainingDriver& driver,
                  const RankBackend& backend, const std::vector<std::string>& parts) {
  Trace measured = merge_traces(parts);
  // A run that was killed behind its last step: its steps are in what it has written.
  if (walked.last < walked.first) measured.metrics = recorded_figures(folder.metrics());
  Diagnostics problems = driver.finish_problems();
  const auto note = [&](const Status& s) {
    if (!s) problems.insert(problems.end(), s.error().begin(), s.error().end());
  };
  auto simulated = simulate_run(o, job, folder, hardware, walked);
  if (!simulated) note(tl::unexpected(simulated.error()));
  nlohmann::ordered_json facts = {{"run_hash", walked.run_hash}};
  const auto env = launch_env(process_env);
  if (o.backend != "cpu")
    facts.update(nlohmann::ordered_json{
        {"hardware_evidence", hardware_evidence_line()},
        {"matrix_products", bf16_products(o, start)},
        {"attention_backward", attention_backward(o)},
        {"library_choices", choices_json(backend.library_choices())},
        {"bodies", hardware_evidence_of_bodies(job.plan, measured,
                                               {.backend = o.backend,
                                                .products = o.products,
                                                .attention = o.attention,
                                                .processes = env && *env && (*env)->world_size > 1})}});
  note(write_run_folder(folder, job,
                        {.trace = measured,
                         .predicted = simulated ? &*simulated : nullptr,
                         .calibration = hardware.source,
                         .walked = walked,
                         .facts = &facts}));
  note(end_in_folder(folder));
  auto summary = summarize(job.plan, job.scenario, measured);
  const Comparison compared = simulated ? compare_traces(job.plan, *simulated, measured) : Comparison{};
  if (simulated) summary["equal"] = compared.equal;
  summary.update(facts);
  if (o.scenario.json) {
    print_document(json_text(summary, 1));
    if (simulated && !compared.equal) fmt::print(stderr, "{}", render_comparison(compared, false));
  } else {
    print_result(render_summary(summary, use_colour(), simulated ? &compared : nullptr));
    if (o.backend != "cpu")
      print_result(fmt::format("{}; {}; matrix products: {}; attention's backward: {}\n", hardware_evidence_line(),
                               hardware_evidence_line(facts["bodies"]), bf16_products(o, start),
                               attention_backward(o)));
    if (problems.empty()) print_result(fmt::format("Report: {}\n", printable_line(folder.report().string())));
    flush_output();  // before ranks meet again and give their devices back
  }
  if (!problems.empty()) {
    report_errors(problems);
    return exit_runtime;
  }
  if (!o.scenario.json) say_next("compare " + shell_quoted(folder.root.string()));
  return compared.equal ? exit_done : exit_no;
}

/// What the run's checkpoints carry along.
Result<std::vector<CarriedFile>> carried_files(const Scenario& s) { return read_carried(s.model.weights_path); }

/// `start`: with rank 0's products, where this rank takes them. `hardware`: of rank 0, which simulates at the end.
int run_rank(const RunArguments& o, const Job& job, Start& start, StopSignals& stop, World& world,
             const RunFolder& folder, const std::optional<Hardware>& hardware, const MakeBackend& make_backend) {
  const bool first = world.rank() == 0;
  share_products(world, bf16_products(o, start), o.backend == "cpu" && !start.asked.fixed && has_bf16(job.scenario),
                 start.products);
  const int threads = compute_threads(o, world);
  const PlanFacts agreed = run_facts(job, shared_options(o, threads, start));
  if (auto s = check_agreement(world, agreed); !s) {
    world.leave();
    return report_errors(s.error());
  }
  if (o.backend == "cpu")  // of a rank that another launcher started: its host may be the only one with a limit
    if (auto s = check_thread_limit(threads, kernels::most_team_threads()); !s) {
      world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), s.error().front().message));
      return report_errors(s.error());
    }
  DriverOptions driver_options;
  driver_options.checkpoints = std::filesystem::absolute(folder.checkpoints());
  driver_options.beside_first = world.size() == 1 || world.same_host(0);
  if (first) {
    auto carried = carried_files(job.scenario);
    if (!carried) return report_errors(carried.error());
    driver_options.carried = std::move(*carried);
  }
  if (world.size() > 1) {
    driver_options.say = [&world](const std::string& key, const std::string& value) { world.set(key, value); };
    driver_options.hear = [&world](const std::string& key, Rank from) { return world.await(key, from); };
  }
  driver_options.arithmetic = arithmetic(o, start, job.scenario);
  if (start.from) driver_options.resume = start.from->checkpoint;
  driver_options.opens_files = first || job.scenario.train.load != "rank0";
  driver_options.threads = threads;
  driver_options.stop_requested = [&stop] { return stop.requested(); };
  RunConsole console(job.scenario, start.first_step(), isatty(fileno(stderr)) != 0);
  std::shared_ptr<RunOutputs> outputs;
  if (first) {
    outputs = std::make_shared<RunOutputs>(
        job, RunOutputOptions{.after_step = start.first_step() - 1,
                              .earlier = start.from ? start.from->run : std::nullopt,
                              .samples_every = o.samples_every,
                              .on_step = [&](const StepFigures& step) { console.show(step); }});
    RunOutputs::observe(outputs, driver_options);
  }
  auto driver = make_training_driver(job.plan, job.scenario, driver_options);
  if (!driver) return report_errors(driver.error());
  if (world.size() > 1) world.barrier("all is read");
  const auto backend = make_backend(**driver, start.first_step() - 1 + o.span_steps, threads);
  if (auto s = check_supported(job.plan, *backend); !s) {  // by every rank: once is enough to say it
    world.leave();
    return first ? report_errors(s.error()) : exit_bad_input;
  }
  if (first) {
    if (auto s = begin_in_folder(folder, job, "measured", takes(o, start, folder.root)); !s)
      return report_errors(s.error());
    for (const std::string& name : sweep_checkpoints(folder.checkpoints()))
      fmt::print(stderr, "removed {}, which a write that was interrupted has left\n",
                 printable_line((folder.checkpoints() / name).string()));
    if (auto s = outputs->open(folder); !s) return report_errors(s.error());
  }
  RunOptions options{.steps = static_cast<std::int32_t>(job.scenario.steps),
                     .local_ranks = {static_cast<Rank>(world.rank())},
                     .first_step = start.first_step()};
  if (outputs) options.on_step_end = [&](std::int32_t step) { return outputs->step_ended(step, *backend, **driver); };
  auto trace = execute(job.plan, *backend, **driver, options);
  if (!trace) {
    const Diagnostic& d = trace.error().front();
    // What every rank comes to by itself: nobody is lost, and whoever is first must not look dead to the others.
    if (d.code == "E630" || d.code == "E704" || d.code == "E706") {
      const bool speaks = first || d.code != "E630";  // it is refused where it was started; a run ends once
      const int code = speaks ? report_errors(trace.error()) : exit_runtime;
      world.leave();
      return code;
    }
    // The others learn why before they learn that this rank is gone.
    world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), d.message));
    const int code = report_errors(trace.error());
    // A run that had begun: a file of lines could not be written any more, or --no-fit-check was given.
    return d.code == "E103" || d.code == "E301" ? exit_runtime : code;
  }
  const StepsWalked walked = steps_walked(o, job, start, **driver, run_hash(agreed));
  const auto parts = gather_strings_at_first(world, "results", pack_trace(*trace));
  const int code =
      first ? finish_rank_0(o, job, start, folder, *hardware, walked, **driver, *backend, parts) : exit_done;
  world.leave();
  return code == exit_done && walked.last < job.scenario.steps ? stop.exit_code() : code;
}

/// The scenario and its plan; what the run goes on from, checked and with its warnings said.
/// Our own launcher has done so before it starts ranks.
/// `first`: this is no rank that takes another's choice.
std::optional<Job> load(const RunArguments& o, bool spawned, bool first, bool speaks, Start& start, int& code) {
  const auto refuse = [&](const Diagnostics& problems) {
    code = report_errors(problems);
    return std::nullopt;
  };
  if (o.resume.empty()) return load_job(o.scenario, code);
  auto from = find_resume(o.resume);
  if (!from) return refuse(from.error());
  auto scenario =
      o.scenario.path.empty() ? scenario_of(*from, o.scenario.sets) : load_scenario(o.scenario.path, o.scenario.sets);
  if (!scenario) return refuse(scenario.error());
  if (auto taken = take_choices(*from, *scenario); !taken) return refuse(taken.error());
  start.from = std::move(*from);
  if (o.backend == "cpu")
    start.products =
        choose_products(start.asked, start.from->checkpoint.state.arithmetic.bf16_products, *scenario, first);
  if (!spawned) {
    const auto warnings = check_resume(*start.from, *scenario, arithmetic(o, start, *scenario));
    if (!warnings) return refuse(warnings.error());
    if (speaks) std::fputs(render(*warnings).c_str(), stderr);
    if (speaks && !o.scenario.json)
      fmt::print(
          stderr, "resuming after step {} from {}{}\n", start.from->checkpoint.state.step,
          printable_line(start.from->checkpoint.folder.string()),
          only_its_end_is_left(*start.from, *scenario) ? ": it is the last, what a run's end writes is left" : "");
  }
  ChosenScenario chosen = with_choices(std::move(*scenario));
  std::optional<Job> job = lower_job(std::move(chosen.scenario), code);
  if (job) job->exchange = chosen.exchange;
  return job;
}

int launch(const RunArguments& o, const Job& job, const Start& start, const ClaimedFolder& claimed, StopSignals& stop) {
  for (const auto& [name, value] : team_waits(job.plan.num_ranks(), o.threads, local_cores()))
    ::setenv(name.c_str(), value.c_str(), 0);
  pass_on_claim(claimed);
  ::setenv(bf16_products_variable, bf16_products(o, start).c_str(), 1);
  if (!o.scenario.json) std::fprintf(stderr, "starting %d local ranks\n", job.plan.num_ranks());
  stop.release();
  LaunchOptions options;
  options.on_stop = say_stop;
  const LaunchResult result = spawn_local(job.plan.num_ranks(), o.argv, options);
  // Exit code 1 is an answer, which rank 0 has given; where all ranks ended alike, none of them is to be named.
  const bool alike = std::ranges::all_of(
      result.ranks, [&](const RankExit& e) { return e.signal == 0 && e.exit_code == result.exit_code; });
  if (rank_0_spoke(result)) errors_stay_on_stderr();
  if (!result.message.empty() && result.exit_code != exit_no && !alike) report_errors({stopped(result.message)});
  return result.exit_code;
}

/// The others learn what stopped this rank before they learn that it is gone.
int run_rank_to_its_end(const RunArguments& o, const Job& job, Start& start, StopSignals& stop, World& world,
                        const RunFolder& folder, const std::optional<Hardware>& hardware,
                        const MakeBackend& make_backend) {
  try {
    return run_rank(o, job, start, stop, world, folder, hardware, make_backend);
  } catch (const std::exception& e) {
    world.watch().announce_failure(e.what());
    throw;
  }
}

MakeBackend cpu_backend(const RunArguments& o, const Start& start, CpuWorld& world) {
  return [&o, &start, &world](Driver& driver, std::int32_t span_steps, int threads) {
    CpuOptions cpu;
    cpu.compute_threads = threads;
    cpu.product_paths = start.products;
    cpu.span_steps = span_steps;
    cpu.check_resident = cpu.check_finite = cpu.poison = cpu.check_order = o.check;
    if (o.transport == "gloo") cpu.transport = Transport::gloo;
    if (o.transport == "shm") cpu.transport = Transport::shm;
    return std::make_unique<CpuBackend>(world, driver, cpu);
  };
}

/// What only one of the backends knows, and how its ranks come to be.
Status check_backend(const RunArguments& o) {
  const auto refuse = [](std::string message, std::string help) {
    return fail(
        Diagnostic{.code = "E707", .message = std::move(message), .where = {}, .notes = {}, .help = std::move(help)});
  };
  if (o.backend == "cpu" && !o.fake_fault.empty())
    return refuse("--fake-fault is of the driver's double, and the backend is cpu", "add --backend cuda-fake");
  if (o.backend == "cpu" && !o.products.empty())
    return refuse("--products is of the CUDA backend, and the backend is cpu", "add --backend cuda, or leave it out");
  if (o.backend == "cpu" && !o.attention.empty())
    return refuse("--attention-backward is of the CUDA backend, and the backend is cpu",
                  "add --backend cuda, or leave it out");
  if (o.backend == "cpu") return {};
  if (const auto products = cuda_products(o.backend, o.products); !products) return fail(products.error());
  if (const auto attention = cuda_attention(o.backend, o.attention); !attention) return fail(attention.error());
  if (!o.transport.empty())
    return refuse(
        fmt::format("--transport {} carries between CPU ranks, and the backend is {}", o.transport, o.backend),
        "leave --transport out: ranks of one process have a transport of their own, and several processes have NCCL");
  return {};
}

int run_cuda(const RunArguments& o, const Job& job, Start& start, StopSignals& stop, const ClaimedFolder& claimed,
             const std::optional<Hardware>& hardware, const std::optional<LaunchEnv>& env) {
  const bool processes = env && env->world_size > 1;
  if (!o.scenario.json && (!env || env->rank == 0))
    fmt::print(stderr, "starting {} ranks on {} ({}); matrix products: {}; attention's backward: {}\n",
               job.plan.num_ranks(), processes ? "a device each" : "one device", hardware_evidence_line(),
               bf16_products(o, start), attention_backward(o));
  stop.hold();
  const auto code =
      run_on_cuda({.fake = o.backend == "cuda-fake",
                   .fake_seed = o.fake_seed,
                   .fake_fault = o.fake_fault,
                   .fake_bytes = fake_device_bytes(job, processes),
                   .check_order = o.check,
                   .products = o.products,
                   .attention = o.attention,
                   .ranks = job.plan.num_ranks(),
                   .env = env,
                   .world = world_options(job)},
                  [&](World& world, const MakeBackend& make) {
                    try {
                      return run_rank_to_its_end(o, job, start, stop, world, claimed.folder, hardware, make);
                    } catch (const RuntimeFailure& e) {
                      return report_errors({stopped(e.what())});
                    }
                  });
  return code ? *code : report_errors(code.error());
}

int run(const RunArguments& o) {
  const bool spawned = process_env(launcher_variable) == std::to_string(::getppid());
  StopSignals stop(spawned);  // before any thread
  int code = exit_done;
  auto env = launch_env(process_env);
  if (!env) return report_errors(env.error());
  const bool launched = env->has_value(), on_cpu = o.backend == "cpu";
  if (auto s = check_backend(o); !s) return report_errors(s.error());
  if (launched && (*env)->rank != 0) errors_stay_on_stderr();  // rank 0 says it on stdout
  if (!spawned) stop.on_request(say_stop);
  if (launched) stop.hold();
  const bool speaks = !launched || ((*env)->rank == 0 && !spawned);
  if (auto s = readable_by_every_rank(o.scenario.path); !s) return report_errors(s.error());
  Start start;
  if (on_cpu) {
    auto asked = products_asked(process_env, kernels::bf16_unit());
    if (!asked) return report_errors(asked.error());
    start.asked = *asked;
  }
  const bool first = !launched || (*env)->rank == 0;
  const auto job = load(o, spawned, first, speaks, start, code);
  if (!job) return code;
  if (speaks && !spawned) note_undisturbed(job->scenario, "this run");
  if (speaks && !spawned) note_auto(job->scenario, job->exchange);
  if (auto s = on_this_machine(job->scenario, o.on_cpu || !on_cpu, "--on-cpu runs its plan here all the same; "); !s)
    return report_errors(s.error());
  if (auto s = weights_are_here(job->scenario); !s) return report_errors(s.error());
  if (const std::string& name = job->scenario.name;
      o.out.empty() && (name.empty() || name.find('/') != std::string::npos || name.front() == '.'))
    return report_errors({Diagnostic{.code = "E226",
                                     .message = fmt::format("the scenario's name '{}' is no name of a folder", name),
                                     .where = {o.scenario.path},
                                     .notes = {"without --out the run folder is runs/NAME"},
                                     .help = "set name to a plain word, or give --out"}});
  if (launched && (*env)->world_size != job->plan.num_ranks())
    return report_errors(
        {Diagnostic{.code = "E704",
                    .message = fmt::format("the plan has {} ranks, but {} processes were launched ({})",
                                           job->plan.num_ranks(), (*env)->world_size, (*env)->source),
                    .where = {},
                    .notes = {},
                    .help = fmt::format("launch {} processes, or change train.layout", job->plan.num_ranks())}});
  if (on_cpu && !launched)  // its ranks will have the same limit
    if (auto s = check_thread_limit(threads_of_rank(job->plan.num_ranks(), o.threads, local_cores()),
                                    kernels::most_team_threads());
        !s)
      return report_errors(s.error());
  ClaimedFolder claimed;
  std::optional<Hardware> hardware;
  if (first) {  // say it once
    if (auto s = check_drift(o, *job); !s) return report_errors(s.error());
    if (const auto error = fit_error(*job); error && !o.no_fit_check) return report_errors({*error});
    const std::string out = out_of(o, start);
    if (takes(o, start, out) == Takes::resume)
      if (auto s = check_target(*start.from, {out}); !s) return report_errors(s.error());
    auto claim = claim_folder(out, *job, takes(o, start, out));
    if (!claim) return report_errors(claim.error());
    claimed = std::move(*claim);
    // What cannot be read is said here: before every rank finds out for itself, or the last step is done.
    auto priced_by = hardware_of(job->scenario);
    if (!priced_by) return report_errors(priced_by.error());
    hardware = std::move(*priced_by);
    DriverOptions options;
    if (start.from) options.resume = start.from->checkpoint;
    if (auto driver = make_training_driver(job->plan, job->scenario, options); !driver)
      return report_errors(with_file(driver.error(), o.scenario.path));
    if (const auto carried = carried_files(job->scenario); !carried) return report_errors(carried.error());
  }
  if (on_cpu && !start.from) start.products = choose_products(start.asked, "", job->scenario, first);
  if (speaks && !spawned && on_cpu && !o.scenario.json && start.products != kernels::rule_of_machine())
    fmt::print(stderr, "products of bf16: {}\n", bf16_products(o, start));
  try {
    if (!on_cpu) return run_cuda(o, *job, start, stop, claimed, hardware, *env);
    if (launched) {
      CpuWorld world(**env, world_options(*job));
      return run_rank_to_its_end(o, *job, start, stop, world, claimed.folder, hardware, cpu_backend(o, start, world));
    }
    if (job->plan.num_ranks() > 1) return launch(o, *job, start, claimed, stop);
    stop.hold();
    CpuWorld world;
    return run_rank(o, *job, start, stop, world, claimed.folder, hardware, cpu_backend(o, start, world));
  } catch (const RuntimeFailure& e) {
    return report_errors({stopped(e.what())});
  }
}

/// This process's own command line, with the program's path made absolute.
std::vector<std::string> own_command_line() {
  std::vector<std::string> out;
  if (const auto text = read_file("/proc/self/cmdline"))
    for (std::size_t at = 0; at < text->size();) {
      out.emplace_back(text->c_str() + at);
      at += out.back().size() + 1;
    }
  if (!out.empty()) out[0] = "/proc/self/exe";
  return out;
}

}  // namespace

void add_run(CommandLine& line) {
  auto o = std::make_shared<RunArguments>();
  const Command sub = line.add_command("run", "execute the plan for real, on CPU ranks or a CUDA device");
  add_scenario_options(sub, o->scenario);
  sub.find("scenario").required(false);  // a checkpoint has one
  sub.option("--out", o->out, "run folder (default runs/NAME, or runs/NAME-2, … when that holds a run)");
  sub.flag("--overwrite", o->overwrite, "remove what an earlier run wrote in the run folder");
  sub.option("--resume", o->resume,
             "go on from a run folder's furthest checkpoint, or from a checkpoint: bit for bit the run that was not "
             "interrupted");
  sub.option("--plan", o->plan, "a plan saved by `plan --out`: refuse to run anything else");
  sub.option(
         "--backend", o->backend,
         "cpu (a process per rank), cuda (ranks as threads on one device, or as processes that torchrun, Slurm or MPI "
         "launched, each on its own over NCCL) or cuda-fake (the "
         "same on a double of the driver, which executes the kernels' PTX and checks them: slow)")
      .check(one_of({"cpu", "cuda", "cuda-fake"}));
  sub.option("--fake-seed", o->fake_seed, "cuda-fake: which of the orders that streams and events allow");
  sub.option(
      "--fake-fault", o->fake_fault,
      "cuda-fake: ENTRY:N, the Nth call of that entry point of the driver, cuBLASLt, cuDNN or NCCL fails; "
      "ENTRY:N:hang, it never returns; of NCCL also ENTRY:N:async, it is taken and fails later; @RANK behind it: "
      "of that rank's process alone; seed:S, one of those, drawn");
  sub.option(
         "--products", o->products,
         "cuda: which matrix products cuBLASLt forms: own (none), backward (those alone), equal (default where it is: "
         "those, and forward ones in which it gives our kernels' bits, so log-probs of rollout and training stay "
         "equal to the bit) or all (they do not)")
      .check(one_of({"own", "backward", "equal", "all"}));
  sub.option(
         "--attention-backward", o->attention,
         "cuda: who forms attention's gradients: own (default), or cudnn what it takes of them, on Hopper; log-probs "
         "of rollout and training stay equal to the bit either way")
      .check(one_of({"own", "cudnn"}));
  sub.option("--transport", o->transport, "collectives over shm or gloo (default: shm on one host)")
      .check(one_of({"shm", "gloo"}));
  sub.option("--threads", o->threads, "compute threads of each rank (default: its share of the cores)")
      .check(thread_count());
  sub.option("--trace-steps", o->span_steps, "iterations whose ops are kept in the trace").check(whole_from(0));
  sub.option("--samples-every", o->samples_every,
             "write samples of every n-th step, 0: none (default: the first, about 20 more and the last)")
      .check(whole_from(0));
  sub.flag("--check", o->check,
           "debug: NaN at the op that made it, poisoned buffers, accesses that no event orders, "
           "resident = mapped bytes after every phase");
  sub.flag("--no-fit-check", o->no_fit_check,
           "start although the plan does not fit; the arena still enforces the capacity");
  sub.flag("--on-cpu", o->on_cpu, "run on this machine's CPU although the scenario's devices are others");
  sub.action(
      [o] {
        o->argv = own_command_line();
        return run(*o);
      },
      [o] { return o->scenario.path.empty() && o->resume.empty() ? "scenario" : ""; });
}

}  // namespace hotbunk
