// Decoding with the 46M model: `batch` sequences from a context of 128 to 384 tokens, greedy, one rank. What runs is
// the lowered rollout with the driver behind `hotbunk generate`: paged KV cache, scheduler and sampling included.
//   bench_decode_step [--dtype fp32|bf16] [--cache auto|fp32|bf16] [--threads 2] [--batch 1] [--prefill 0|1]
// Speaks the turns of bench/rounds.h: 16 decode steps each, or with --prefill 1 one step of `batch` prompts of 512
// tokens each.
#include "backends/cpu_gloo/cpu_backend.h"
#include "base/check.h"
#include "bench/rounds.h"
#include "lowering/lower.h"
#include "rl/inference_driver.h"
#include "spec/family.h"

namespace hotbunk::bench {
namespace {

/// What is timed of a rollout, and how many tokens and steps are a round.
struct Timed {
  int block;  // 0 prefill, 1 decode (lowering/rollout.h)
  std::int64_t steps_per_round, tokens_per_round;
};

/// Takes the times of an InferenceDriver's steps; the first round warms up.
class TimedDriver final : public Driver {
 public:
  TimedDriver(Driver& inner, std::int16_t rollout, Timed timed) : inner_(inner), rollout_(rollout), timed_(timed) {}

  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    // Here all earlier steps have ended: results are wanted, so each is synced.
    if (phase == rollout_ && steps_ > 0 && steps_ % timed_.steps_per_round == 0) {
      if (steps_ == timed_.steps_per_round) rounds_.ready();
      else rounds_.done(timed_.tokens_per_round);
    }
    auto args = inner_.next(r, step, phase);
    if (args && phase == rollout_ && args->block == timed_.block) ++steps_;
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
  const Timed timed_;
  std::int64_t steps_ = 0;
  Rounds rounds_;
};

void run(DType dtype, const std::string& cache, int threads, std::int64_t batch, bool prefill) {
  constexpr std::int64_t prefills = 17;  // the first warms up
  std::vector<TokenSequence> prompts;
  const std::int64_t length = prefill ? prefill_tokens : prompt_tokens;
  for (std::int64_t i = 0; i < (prefill ? prefills * batch : batch); ++i)
    prompts.push_back({random_tokens(length, static_cast<std::uint32_t>(i)), length, {}});
  ModelSpec model = llama_46m();
  model.family = find_family("llama");
  Scenario s = generate_scenario(
      model, prompts,
      {.max_new_tokens = prefill ? 1 : new_tokens, .temperature = 0.0, .seed = 0, .tp = 1, .dtype = dtype});
  HB_CHECK(cache == "auto" || cache == "fp32" || cache == "bf16", "--cache {}", cache);
  s.rollout.kv_cache_dtype = cache;
  if (prefill) s.rollout.max_prefill_tokens = batch * length;
  const Plan plan = value_or_exit(lower(s, Purpose::generate));
  const auto driver = value_or_exit(InferenceDriver::create(plan, s, std::move(prompts)));
  const Timed what = prefill ? Timed{0, 1, batch * length} : Timed{1, steps_per_round, batch * steps_per_round};
  TimedDriver timed(*driver, static_cast<std::int16_t>(plan.phase_index("rollout")), what);
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
      option(argc, argv, "--cache", "auto"), std::stoi(option(argc, argv, "--threads", "2")),
      std::stoll(option(argc, argv, "--batch", "1")), option(argc, argv, "--prefill", "0") == "1");
}
