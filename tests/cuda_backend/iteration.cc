#include "tests/cuda_backend/iteration.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/fake/fake_blas.h"
#include "backends/cuda/fake/fake_dnn.h"
#include "base/check.h"
#include "base/file.h"
#include "rl/sft_driver.h"
#include "runtime/deadline.h"
#include "runtime/launch.h"
#include "spec/loader.h"
#include "tests/cuda_backend/processes.h"
#include "trace/merge.h"

namespace hotbunk::test {

const char* const tiny_job_text = R"(
name: tiny
model: {model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 4, vocab_size: 16, max_position_embeddings: 32,
  rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: false, initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}
cluster: {gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: 2, device_memory_mib: 8}
train: {layout: {dp: 2}, micro_batch_tokens: 32, precision: {params: fp32}, offload: sleep}
optimizer: {lr: 1.0e-3}
rollout: {engine: hotbunk, layout: {tp: 2, dp: 1}, max_running_requests: 4, max_prefill_tokens: 16, block_tokens: 4, kv_cache_tokens: 32}
sync: {bucket_mib: 0.004, transport: ipc, verify: true}
algorithm: {name: grpo, prompts: 2, samples_per_prompt: 2}
workload: {prompt_tokens: {mean: 3, max: 3, distribution: fixed}, response_tokens: {mean: 2, max: 2, distribution: fixed}}
task: {name: reverse, digits: 1}
steps: 1
)";

Result<Scenario> load_tiny_job(const std::vector<std::string>& sets) {
  return load_scenario_text(tiny_job_text, "tiny.yaml", sets);
}

Scenario tiny_job(const std::vector<std::string>& sets) {
  auto s = load_tiny_job(sets);
  HB_CHECK(s.has_value(), "{}", render(s.error()));
  return *s;
}

bool Iteration::went_well() const { return text().empty(); }
std::string Iteration::text() const {
  std::string all;
  for (const std::string& f : findings) all += f + "\n";
  for (const std::string& f : failures) all += f;
  return all;
}

namespace {

constexpr std::size_t most_samples = 64;

DriverOptions listening_to(std::string& numbers, std::vector<SampleLengths>* all = nullptr) {
  DriverOptions out;
  out.on_samples = [&numbers, all](std::int32_t step, const SampleLengths& lengths) {
    numbers += fmt::format("step {}: {} tokens\n", step, fmt::join(lengths.response_tokens, " "));
    if (all != nullptr) all->push_back(lengths);
  };
  out.on_step = [&](const StepMetrics& m) {
    for (const auto& [name, value] : m.values) numbers += fmt::format("{} {:a}\n", name, value);
  };
  return out;
}

/// Runs this rank's part. What rank 0 learns of samples and figures goes into `out`; the rank's trace is returned.
template <class MakeBackend>
Result<Trace> play(const Plan& plan, const Scenario& scenario, World& world, Iteration& out, const Setting& setting,
                   const MakeBackend& make) {
  const auto rank = static_cast<Rank>(world.rank());
  DriverOptions options = rank == 0 ? listening_to(out.numbers, &out.lengths) : DriverOptions{};
  options.checkpoints = setting.checkpoints, options.resume = setting.resume;
  if (world.size() > 1) {
    options.say = [&world](const std::string& key, const std::string& value) { world.set(key, value); };
    options.hear = [&world](const std::string& key, Rank from) { return world.await(key, from); };
  }
  auto driver = make_training_driver(plan, scenario, options);
  if (!driver) return fail(driver.error());
  const auto backend = make(**driver);
  const auto steps = static_cast<std::int32_t>(scenario.steps);
  const auto first = setting.resume ? static_cast<std::int32_t>(setting.resume->state.step) + 1 : 1;
  auto trace = execute(plan, *backend, **driver, {.steps = steps, .local_ranks = {rank}, .first_step = first});
  if (trace && rank == 0) out.choices = backend->library_choices();
  if (trace && rank == 0)
    for (const SampleRecord& r : (*driver)->sample_records(steps, 0, most_samples))
      out.samples.push_back(r.sequence.tokens);
  return trace;
}

}  // namespace

std::vector<std::string> numbers_over_nccl(const Plan& plan, const Scenario& scenario) {
  return cuda::test::in_ranks(plan.num_ranks(), [&](cuda::test::NcclProcess& p) {
    std::string numbers;
    auto driver = make_training_driver(plan, scenario, p.world.rank() == 0 ? listening_to(numbers) : DriverOptions{});
    if (!driver) return render(driver.error());
    cuda::CudaBackend backend(p.world, **driver, {});
    const auto trace = execute(plan, backend, **driver, {.local_ranks = {static_cast<Rank>(p.world.rank())}});
    return trace ? numbers : render(trace.error());
  });
}

bool Processes::went_well() const {
  return std::ranges::all_of(codes, [](int code) { return code == 0; }) && text().empty();
}
std::string Processes::text() const { return fmt::format("{}", fmt::join(said, "")); }

namespace {

/// One rank's process, as `hotbunk run` has it; why it failed, or "".
std::string run_process(const Plan& plan, const Scenario& scenario, const LaunchEnv& env, const WorldOptions& options,
                        cuda::FakeDriver& fake, const cuda::FakeNccl& nccl, Iteration& out) {
  try {
    std::shared_ptr<cuda::Context> context;
    {
      const Deadline deadline(fmt::format("rank {}, opening the device,", env.rank), options.timeout_seconds);
      context = std::make_shared<cuda::Context>(fake.table());
    }
    cuda::CudaWorld world(std::move(context), nccl.table(), env, options);
    std::string failure;
    try {
      const auto trace = play(plan, scenario, world, out, {}, [&](TrainingDriver& driver) {
        return std::make_unique<cuda::CudaBackend>(world, driver, cuda::CudaOptions{.span_steps = 0, .scope = ""});
      });
      if (trace) world.leave();
      else failure = render(trace.error());
    } catch (const RuntimeFailure& e) {
      failure = e.what();
    }
    if (!failure.empty()) world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), failure));
    return failure;
  } catch (const RuntimeFailure& e) {
    return e.what();
  }
}

}  // namespace

Processes run_over_nccl(const Plan& plan, const Scenario& scenario, const std::optional<cuda::FakeFault>& fault,
                        double timeout_s, std::uint64_t seed) {
  namespace fs = std::filesystem;
  const auto modules = cuda::test::parsed_kernels();
  const fs::path folder = fs::temp_directory_path() / fmt::format("hotbunk_over_nccl.{}", ::getpid());
  fs::create_directories(folder);
  const auto file = [&](const char* what, int rank) { return folder / fmt::format("{}.{}", what, rank); };
  const auto began = std::chrono::steady_clock::now();
  const LaunchResult ended = fork_ranks(plan.num_ranks(), [&](const LaunchEnv& env) {
    if (std::freopen(file("stderr", env.rank).c_str(), "w", stderr) == nullptr) return 4;
    std::setvbuf(stderr, nullptr, _IONBF, 0);  // who is stuck ends at once
    cuda::FakeDriver fake({.memory_bytes = std::int64_t{64} << 20,
                           .seed = seed + static_cast<std::uint64_t>(env.rank),
                           .granularity_bytes = 4096,
                           .modules = modules});
    const cuda::FakeNccl nccl(fake);
    if (fault && fault->rank.value_or(env.rank) == env.rank) cuda::put(fake, *fault);
    Iteration out;
    std::string failure =
        run_process(plan, scenario, env, {.connect_seconds = 4, .timeout_seconds = timeout_s, .unwind_seconds = 0.5},
                    fake, nccl, out);
    for (const std::string& finding : fake.findings()) failure += "\nfound: " + finding;
    const nlohmann::json learned = {
        {"failure", failure}, {"calls", fake.calls()}, {"met", fake.faults_met()}, {"numbers", out.numbers}};
    const bool written = write_file_atomic(file("learned", env.rank), learned.dump()).has_value();
    return !written ? 4 : failure.empty() ? 0 : 3;
  });
  Processes out;
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  for (const RankExit& e : ended.ranks) {
    const auto learned =
        nlohmann::json::parse(read_file(file("learned", e.rank)).value_or(""), nullptr, /*allow_exceptions=*/false);
    const bool came_back = learned.is_object();
    out.codes.push_back(e.signal == 0 ? e.exit_code : -1);
    out.said.push_back(read_file(file("stderr", e.rank)).value_or("") +
                       (came_back ? learned["failure"].get<std::string>() : "(did not come back)"));
    out.calls.push_back(came_back ? learned["calls"].get<std::map<std::string, std::int64_t>>()
                                  : std::map<std::string, std::int64_t>{});
    out.faults_met += came_back ? learned["met"].get<std::int64_t>() : 1;
    if (e.rank == 0 && came_back) out.numbers = learned["numbers"].get<std::string>();
  }
  fs::remove_all(folder);
  return out;
}

Iteration run_iteration(const Plan& plan, const Scenario& scenario, const Setting& setting) {
  cuda::FakeDriver fake({.memory_bytes = setting.memory_bytes,
                         .seed = setting.seed,
                         .granularity_bytes = 4096,
                         .modules = cuda::test::parsed_kernels()});
  cuda::FakeBlasLt blas(fake);
  cuda::FakeDnn dnn(fake);
  if (setting.blas_sums_as_ours) blas.sum_as_ours();
  if (setting.prepare) setting.prepare(fake);
  cuda::Driver table = fake.table();
  if (setting.tamper) setting.tamper(table);
  const int ranks = plan.num_ranks();
  const auto began = std::chrono::steady_clock::now();
  Iteration out;
  out.failures.resize(static_cast<std::size_t>(ranks));
  std::vector<Trace> parts(static_cast<std::size_t>(ranks));
  const auto play_rank = [&](cuda::CudaWorld& world) -> std::string {
    const auto trace = play(plan, scenario, world, out, setting, [&](TrainingDriver& driver) {
      return std::make_unique<cuda::CudaBackend>(
          world, driver,
          cuda::CudaOptions{.span_steps = 0,
                            .graphs = setting.graphs,
                            .host_threads = setting.host_threads,
                            .check_order = setting.check_order,
                            .blas = blas.table(),
                            .compared = setting.compared,
                            .dnn = setting.dnn_attention ? std::optional(dnn.table()) : std::nullopt,
                            .attention_workspace_bytes = std::int64_t{4} << 20,
                            .products = setting.products,
                            .scope = ""});
    });
    std::string failure = trace ? "" : render(trace.error());
    if (trace) parts[static_cast<std::size_t>(world.rank())] = *trace;
    if (!failure.empty()) world.watch().announce_failure(fmt::format("rank {} failed: {}", world.rank(), failure));
    try {
      world.leave();
    } catch (const RuntimeFailure&) {
      // A rank that failed says no goodbye.
    }
    return failure;
  };
  try {
    const auto context = std::make_shared<cuda::Context>(table);
    const auto local = std::make_shared<cuda::LocalRanks>();
    thread_ranks(ranks, [&](const LaunchEnv& env) {
      std::string& failure = out.failures[static_cast<std::size_t>(env.rank)];
      try {
        context->make_current();
        cuda::CudaWorld world(context, local, env);
        failure = play_rank(world);
      } catch (const std::exception& e) {
        failure = e.what();
      }
      return 0;
    });
  } catch (const RuntimeFailure& e) {
    out.failures.front() = e.what();
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  out.findings = fake.findings();
  out.calls = fake.calls();
  for (const auto& [kernel, counts] : fake.kernel_counts()) out.launches[kernel] = counts.launches;
  out.faults_met = fake.faults_met();
  if (out.went_well()) out.trace = merge_traces(parts);
  return out;
}

Iteration run_on_cpu(const Plan& plan, const Scenario& scenario) {
  HB_CHECK(plan.num_ranks() == 1, "{} ranks in one process", plan.num_ranks());
  Iteration out;
  CpuWorld world;
  const auto trace = play(plan, scenario, world, out, {}, [&](TrainingDriver& driver) {
    return std::make_unique<CpuBackend>(world, driver, CpuOptions{.span_steps = 0, .scope = "", .transport = {}});
  });
  out.failures = {trace ? "" : render(trace.error())};
  if (trace) out.trace = *trace;
  return out;
}

}  // namespace hotbunk::test
