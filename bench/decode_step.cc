// Decoding with the 46M model: `batch` sequences from a context of 128 to 384 tokens, greedy, one rank. What runs is
// the lowered rollout with the driver behind `hotbunk generate`: paged KV cache, scheduler and sampling included.
//   bench_decode_step [--dtype fp32|bf16] [--threads 2] [--batch 1]
// Speaks the turns of bench/rounds.h, 16 decode steps each.
#include "backends/cpu_gloo/cpu_backend.h"
#include "bench/rounds.h"
#include "lowering/lower.h"
#include "rl/inference_driver.h"

namespace hotbunk::bench {
namespace {

constexpr std::int64_t prompt_tokens = 128, new_tokens = 257, steps_per_round = 16;

/// Takes the times of an InferenceDriver's decode steps; the first round warms up.
class TimedDriver final : public Driver {
 public:
  TimedDriver(Driver& inner, std::int16_t rollout, std::int64_t batch)
      : inner_(inner), rollout_(rollout), batch_(batch) {}

  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    // Here all earlier steps have ended: results are wanted, so each is synced.
    if (phase == rollout_ && decoded_ > 0 && decoded_ % steps_per_round == 0) {
      if (decoded_ == steps_per_round) rounds_.ready();
      else rounds_.done(batch_ * steps_per_round);
    }
    auto args = inner_.next(r, step, phase);
    if (args && phase == rollout_ && args->block == 1) ++decoded_;
    return args;
  }
  void feed(Rank r, const BoundOp& op, const Args& a, std::span<std::byte> d) override { inner_.feed(r, op, a, d); }
  void fetch(Rank r, const BoundOp& op, const Args& a, std::span<const std::byte> s) override {
    inner_.fetch(r, op, a, s);
  }
  void completed(Rank r, const Args& a, std::int16_t phase) override { inner_.completed(r, a, phase); }
  bool wants_results() const override { return true; }
  void report(Trace& trace) const override { inner_.report(trace); }

 private:
  Driver& inner_;
  const std::int16_t rollout_;
  const std::int64_t batch_;
  std::int64_t decoded_ = 0;
  Rounds rounds_;
};

void run(DType dtype, int threads, std::int64_t batch) {
  std::vector<TokenSequence> prompts;
  for (std::int64_t i = 0; i < batch; ++i)
    prompts.push_back({random_tokens(prompt_tokens, static_cast<std::uint32_t>(i)), prompt_tokens, {}});
  Scenario s = generate_scenario(
      llama_46m(), prompts, {.max_new_tokens = new_tokens, .temperature = 0.0, .seed = 0, .tp = 1, .dtype = dtype});
  const Plan plan = value_or_exit(lower(s, Purpose::generate));
  const auto driver = value_or_exit(InferenceDriver::create(plan, s, std::move(prompts)));
  TimedDriver timed(*driver, static_cast<std::int16_t>(plan.phase_index("rollout")), batch);
  CpuWorld world;
  CpuOptions cpu;
  cpu.compute_threads = threads;
  cpu.span_steps = 0;
  CpuBackend backend(world, timed, cpu);
  value_or_exit(execute(plan, backend, timed, {.steps = 1, .local_ranks = {0}}));
}

}  // namespace
}  // namespace hotbunk::bench

int main(int argc, char** argv) {
  using namespace hotbunk::bench;
  run(option(argc, argv, "--dtype", "fp32") == "bf16" ? hotbunk::DType::bf16 : hotbunk::DType::f32,
      std::stoi(option(argc, argv, "--threads", "2")), std::stoll(option(argc, argv, "--batch", "1")));
}
