// One optimizer step of the 46M model: 8 sequences of 512 tokens, AdamW with the global norm clipped. What runs is the
// lowered plan with the driver of a user's SFT run. Ranks share the sequences (FSDP) and are processes of this host.
//   bench_train_step [--dtype fp32|bf16] [--ranks 1] [--threads 2, of a rank] [--profile 1]
// Speaks the turns of bench/rounds.h, a step each. With --profile 1: five steps, then seconds by kind of op, on stderr.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/cpu_world.h"
#include "base/file.h"
#include "base/json.h"
#include "bench/rounds.h"
#include "lowering/lower.h"
#include "rl/sft_driver.h"
#include "runtime/launch.h"
#include "spec/family.h"

namespace hotbunk::bench {
namespace {

constexpr std::int64_t num_sequences = 8, sequence_tokens = 512;
constexpr std::int32_t warm_up_steps = 2, profiled_steps = 5;

Scenario scenario(DType dtype, int ranks) {
  Scenario s;
  s.name = "train-step";
  s.model = llama_46m();
  s.model.family = find_family("llama");
  s.cluster.gpu.is_cpu = true;
  s.cluster.gpus_per_node = ranks;
  s.cluster.device_memory_bytes = std::int64_t{6} << 30;
  s.cluster.host_memory_bytes = std::int64_t{1} << 30;
  s.train.layout.dp = ranks;
  s.train.precision.params = dtype;
  s.train.micro_batch_tokens = num_sequences * sequence_tokens / ranks;
  s.algorithm.name = AlgorithmName::sft;
  s.algorithm.prompts = num_sequences;
  s.optimizer.lr = 1e-4;
  return s;
}

/// The data file of the run; main removes it.
std::string write_data() {
  std::string lines;
  for (std::int64_t i = 0; i < num_sequences; ++i)
    lines += json_text(nlohmann::json(random_tokens(sequence_tokens, static_cast<std::uint32_t>(i)))) + "\n";
  const auto path = std::filesystem::temp_directory_path() /
                    fmt::format("hotbunk-train-step-{}.jsonl", static_cast<long>(::getpid()));
  if (auto ok = write_file_atomic(path, lines); !ok) {
    std::fprintf(stderr, "%s", render(ok.error()).c_str());
    std::exit(1);
  }
  return path.string();
}

void print_profile(const std::vector<TimedOp>& timings) {
  std::map<std::string, double> seconds;
  for (const TimedOp& t : timings)
    if (t.step > warm_up_steps)
      seconds[std::string(name_of(t.op->kind))] += 1e-9 * static_cast<double>(t.end_ns - t.start_ns);
  std::vector<std::pair<double, std::string>> sorted;
  double total = 0.0;
  for (const auto& [kind, s] : seconds) sorted.emplace_back(s, kind), total += s;
  std::ranges::sort(sorted, std::greater<>());
  for (const auto& [s, kind] : sorted)
    std::fprintf(stderr, "%-20s %8.2f ms/step %5.1f %%\n", kind.c_str(), 1e3 * s / (profiled_steps - warm_up_steps),
                 100.0 * s / total);
}

struct Settings {
  DType dtype;
  int ranks, threads;
  bool profile;
};

/// One rank; rank 0 speaks.
void run(const Settings& o, const std::string& data, CpuWorld& world) {
  Scenario s = scenario(o.dtype, o.ranks);
  s.task.data = data;
  s.steps = o.profile ? profiled_steps : std::numeric_limits<std::int32_t>::max() - 1;
  const bool profile = o.profile && world.rank() == 0;
  const Plan plan = value_or_exit(lower(s));
  Rounds rounds;
  DriverOptions options;
  if (!o.profile && world.rank() == 0)
    options.on_step = [&](const StepMetrics& m) {
      if (m.step > warm_up_steps) rounds.done(num_sequences * sequence_tokens);
      if (m.step == warm_up_steps) rounds.ready();
    };
  const auto driver = value_or_exit(SftDriver::create(plan, s, options));
  CpuOptions cpu;
  cpu.compute_threads = o.threads;
  cpu.span_steps = profile ? profiled_steps : 0;
  CpuBackend backend(world, *driver, cpu);
  struct Profiled final : Backend {  // timings go when the trace is taken
    explicit Profiled(CpuBackend& b) : inner(b) {}
    CpuBackend& inner;
    Capability supports(const Op& op) const override { return inner.supports(op); }
    Result<std::vector<std::unique_ptr<Device>>> open(const Plan& p, std::span<const Rank> local) override {
      return inner.open(p, local);
    }
    Result<Trace> take_trace() override {
      print_profile(inner.timings());
      return inner.take_trace();
    }
  } profiled(backend);
  value_or_exit(execute(plan, profile ? static_cast<Backend&>(profiled) : backend, *driver,
                        {.steps = static_cast<std::int32_t>(s.steps), .local_ranks = {world.rank()}}));
  world.leave();
}

}  // namespace
}  // namespace hotbunk::bench

int main(int argc, char** argv) {
  using namespace hotbunk;
  using namespace hotbunk::bench;
  const Settings o{option(argc, argv, "--dtype", "fp32") == "bf16" ? DType::bf16 : DType::f32,
                   std::stoi(option(argc, argv, "--ranks", "1")), std::stoi(option(argc, argv, "--threads", "2")),
                   option(argc, argv, "--profile", "0") == "1"};
  const std::string data = write_data();
  int failed = 0;
  if (o.ranks == 1) {
    CpuWorld world;
    run(o, data, world);
  } else {
    failed = fork_ranks(o.ranks, [&](const LaunchEnv& env) {
               CpuWorld world(env);
               run(o, data, world);
               return 0;
             }).exit_code;
  }
  std::filesystem::remove(data);
  return failed;
}
