#include "tests/parity/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "backends/cpu_gloo/kernels/prepack.h"
#include "base/check.h"
#include "base/hash.h"
#include "graph/bound.h"
#include "lowering/lower.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "spec/loader.h"
#include "tests/simulated.h"
#include "trace/merge.h"

namespace hotbunk::testing {

namespace {

void each_prepack(const Program& program, const std::function<void(const BoundOp&)>& see) {
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks)
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind == OpKind::prepack) see(op);
      });
}

}  // namespace

bool packs(const Plan& plan) {
  bool out = false;
  for (const Program& program : plan.programs)
    each_prepack(program, [&](const BoundOp& op) {
      const Tensor& w = op->outputs[0];
      out = out || kernels::packed_order(w.dtype, w.shape[0].size, w.shape[1].size) != kernels::PackedOrder::rows;
    });
  return out;
}

Rows rows_of(const CpuBackend& backend, const Plan& plan, const std::string& buffer) {
  const std::span<const std::byte> held = backend.peek(buffer);
  Rows out{{held.begin(), held.end()}};
  const Op* prepack = nullptr;
  // The rank's own program: a table that is embedding on the first stage and head on the last is packed on the last.
  each_prepack(plan.program(backend.rank()), [&](const BoundOp& op) {
    if (op.buffer(op->outputs[0]).name() == buffer) prepack = op.op;
  });
  if (prepack == nullptr || held.empty()) return out;
  const Tensor& w = prepack->outputs[0];
  kernels::KernelContext context(1);
  kernels::unpack(context, out.bytes.data(), w.dtype, w.shape[0].size, w.shape[1].size);
  out.moved = !std::ranges::equal(out.bytes, held);
  return out;
}

std::string packable_model(bool tied) {
  return fmt::format(
      "model={{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 64, intermediate_size: 128, "
      "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, vocab_size: 64, "
      "max_position_embeddings: 64, rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: {}, "
      "initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}}",
      tied);
}

Scenario tiny_scenario(int world, int tp, const std::vector<std::string>& sets) {
  const std::string text = fmt::format(R"(
name: tiny
model: {{model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 24, intermediate_size: 40, num_hidden_layers: 3,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, vocab_size: 33, max_position_embeddings: 64,
  rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: false, initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}}
cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {0}, device_memory_mib: 16}}
train:
  layout: {{dp: {0}}}
  micro_batch_tokens: 64
  precision: {{params: fp32}}
  offload: sleep
optimizer: {{lr: 1.0e-3}}
rollout:
  engine: hotbunk
  layout: {{tp: {1}, dp: {2}}}
  max_running_requests: 6
  max_prefill_tokens: 24
  block_tokens: 4
  kv_cache_tokens: 40
sync: {{bucket_mib: 0.008}}
algorithm: {{name: grpo, prompts: 5, samples_per_prompt: 4}}
workload: {{prompt_tokens: {{mean: 5, max: 5}}, response_tokens: {{mean: 4, max: 6}}}}
task: {{name: reverse, digits: 3}}
steps: 2
)",
                                       world, tp, world / tp);
  auto s = load_scenario_text(text, "tiny.yaml", sets);
  HB_CHECK(s.has_value(), "{}", render(s.error()));
  return *s;
}

namespace {

/// Forwards to the real driver and calls the case's observer when a phase begins.
class Observer final : public Driver {
 public:
  Observer(const Plan& plan, Driver& inner, const Case& job) : plan_(plan), inner_(inner), job_(job) {}
  void watch(const CpuBackend& backend) { backend_ = &backend; }

  std::optional<Args> next(Rank rank, std::int32_t step, std::int16_t phase) override {
    if (job_.before_phase && std::pair(step, phase) != seen_) {
      seen_ = {step, phase};
      const std::string bad = job_.before_phase(*backend_, step, plan_.phases[static_cast<std::size_t>(phase)].name);
      if (!bad.empty()) throw RuntimeFailure(bad);
    }
    return inner_.next(rank, step, phase);
  }
  void feed(Rank r, const BoundOp& op, const Args& a, std::span<std::byte> to) override {
    inner_.feed(r, op, a, to);
    if (!job_.all_fed) return;
    Hasher h;
    h.add(op.name()), h.add(std::int64_t{a.step}), h.add(to);
    fed_ += std::stoull(h.hex().substr(0, 16), nullptr, 16);  // in any order
  }
  std::uint64_t fed() const { return fed_; }
  void fetch(Rank r, const BoundOp& op, const Args& a, std::span<const std::byte> from) override {
    inner_.fetch(r, op, a, from);
  }
  void completed(Rank r, const Args& a, std::int16_t phase) override { inner_.completed(r, a, phase); }
  Status step_ended(std::int32_t step) override { return inner_.step_ended(step); }
  bool wants_results() const override { return inner_.wants_results(); }
  void report(Trace& t) const override { inner_.report(t); }

 private:
  const Plan& plan_;
  Driver& inner_;
  const Case& job_;
  const CpuBackend* backend_ = nullptr;
  std::pair<std::int32_t, std::int16_t> seen_{-1, -1};
  std::atomic<std::uint64_t> fed_ = 0;  // streams feed at the same time
};

Result<Trace> execute_case(const Plan& plan, CpuBackend& backend, Driver& driver, const RunOptions& run) {
  try {
    return execute(plan, backend, driver, run);
  } catch (const RuntimeFailure& e) {
    return fail(Diagnostic{.code = "E603", .message = e.what(), .where = {}, .notes = {}, .help = ""});
  }
}

/// This rank's part of one case; the complaint, on rank 0.
std::string run_case(CpuWorld& world, const Case& job, std::size_t index, const Check& check, CpuOptions options,
                     std::vector<std::unique_ptr<CpuBackend>>& keep) {
  auto plan = lower(job.scenario);
  if (!plan) return render(plan.error());
  if (job.mutate) job.mutate(*plan);
  std::vector<SampleLengths> lengths;
  DriverOptions listening;
  listening.on_samples = [&](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  auto driver = make_training_driver(*plan, job.scenario, listening);
  if (!driver) return render(driver.error());
  options.scope = fmt::format("{}.", index);
  Observer observer(*plan, **driver, job);
  keep.push_back(std::make_unique<CpuBackend>(world, observer, options));  // arenas live as long as the world
  observer.watch(*keep.back());
  const RunOptions run{.steps = static_cast<std::int32_t>(job.scenario.steps),
                       .local_ranks = {static_cast<Rank>(world.rank())}};
  auto trace = execute_case(*plan, *keep.back(), observer, run);
  if (!job.fails_with.empty()) {
    const std::string found = trace ? "no error" : render(trace.error());
    return found.find(job.fails_with) != found.npos ? "" : fmt::format("not '{}': {}", job.fails_with, found);
  }
  if (!trace) return render(trace.error());
  if (job.all_fed)
    if (std::string bad = job.all_fed(observer.fed()); !bad.empty()) return bad;
  const auto parts = gather_strings_at_first(world, options.scope + "trace", pack_trace(*trace));
  if (world.rank() != 0) return "";
  return check({job, *plan, merge_traces(parts), lengths});
}

}  // namespace

std::string run_cases(int ranks, const std::vector<Case>& cases, const Check& check, CpuOptions options) {
  const LaunchResult result = fork_ranks(ranks, [&](const LaunchEnv& env) {
    std::vector<std::unique_ptr<CpuBackend>> keep;
    CpuWorld world(env);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const std::string bad = run_case(world, cases[i], i, check, options, keep);
      if (bad.empty()) continue;
      std::fprintf(stderr, "rank %d, case %s: %s\n", world.rank(), cases[i].name.c_str(), bad.c_str());
      return 1;
    }
    world.leave();
    return 0;
  });
  return result.exit_code == 0 ? "" : result.message.empty() ? "a case failed" : result.message;
}

Result<Trace> simulate(const Outcome& outcome, const Plan& plan) {
  return simulate(plan, outcome.job.scenario, outcome.lengths);
}

std::string complaint(const Outcome& outcome, const Plan& plan) {
  return unlike_simulated(plan, outcome.job.scenario, outcome.lengths, outcome.measured);
}

}  // namespace hotbunk::testing
