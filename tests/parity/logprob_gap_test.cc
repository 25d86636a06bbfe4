// P5's second half: what rollout says of the tokens that it sampled, training says too, to the bit, where both compute
// in fp32 and the engines are not cut: kernels whose rows know nothing of each other
// (backends/cpu_gloo/kernels/row_gemm.h, attention_step.h) make batch, chunk of prefill, micro-batch and number of
// threads invisible.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>

#include "lowering/lower.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

struct Shape {
  const char* type = "llama";
  const char* architecture = "LlamaForCausalLM";
  int hidden = 24, intermediate = 40, heads = 4, kv_heads = 2, head_dim = 6, vocab = 33;
  bool tied = false;
  const char* more = "";  // further keys
};

std::string model(const Shape& s) {
  return fmt::format(
      "model={{model_type: {}, architectures: [{}], hidden_size: {}, intermediate_size: {}, num_hidden_layers: 2, "
      "num_attention_heads: {}, num_key_value_heads: {}, head_dim: {}, vocab_size: {}, max_position_embeddings: 256, "
      "rms_norm_eps: 1.0e-5, rope_theta: 10000.0, tie_word_embeddings: {}, initializer_range: 0.2, bos_token_id: 1, "
      "eos_token_id: 2{}}}",
      s.type, s.architecture, s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.vocab, s.tied, s.more);
}

/// "" when every step compared tokens and found no difference at all.
std::string gap(const Outcome& o) {
  if (static_cast<std::int64_t>(o.measured.metrics.size()) != o.job.scenario.steps)
    return fmt::format("{} steps have metrics", o.measured.metrics.size());
  for (const StepMetrics& m : o.measured.metrics) {
    const auto mean = m.values.find("rollout/logprob_gap_mean"), max = m.values.find("rollout/logprob_gap_max");
    if (mean == m.values.end() || max == m.values.end()) return fmt::format("step {} compares no tokens", m.step);
    if (mean->second != 0.0 || max->second != 0.0)
      return fmt::format("step {}: gap {:.3g} at most, {:.3g} on average", m.step, max->second, mean->second);
  }
  return "";
}

const std::string long_prompts = "workload={prompt_tokens: {mean: 5, max: 5}, response_tokens: {mean: 90, max: 100}}";

}  // namespace

TEST_CASE("fp32 log-probs of rollout and training are equal to the bit, 1 rank(s)") {
  const Shape wide{.hidden = 96, .intermediate = 200, .heads = 6, .kv_heads = 1, .head_dim = 16, .vocab = 77};
  const Shape qwen2{.type = "qwen2",
                    .architecture = "Qwen2ForCausalLM",
                    .hidden = 40,
                    .intermediate = 56,
                    .heads = 5,
                    .kv_heads = 5,
                    .head_dim = 8};
  const Shape qwen3{
      .type = "qwen3", .architecture = "Qwen3ForCausalLM", .hidden = 32, .heads = 8, .kv_heads = 2, .head_dim = 20};
  const Shape tied{.hidden = 33, .intermediate = 17, .heads = 3, .kv_heads = 1, .head_dim = 10, .tied = true};
  const std::vector<std::string> roomy = {"train.micro_batch_tokens=512", "cluster.device_memory_mib=64",
                                          "rollout.kv_cache_tokens=1024"};
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, std::vector<std::string> sets) {
    cases.push_back({name, tiny_scenario(1, 1, sets)});
  };
  const auto with = [](std::vector<std::string> base, const std::vector<std::string>& more) {
    base.insert(base.end(), more.begin(), more.end());
    return base;
  };
  add("as it is", {});
  add("temperature", {"rollout.temperature=0.7", "rollout.top_p=0.9"});
  add("greedy", {"rollout.temperature=0", "algorithm.samples_per_prompt=2"});
  add("wide, multi-query", with(roomy, {model(wide), "rollout.temperature=1.3"}));
  add("Qwen2: biases, no groups", with(roomy, {model(qwen2)}));
  add("Qwen3: norms of queries and keys", with(roomy, {model(qwen3), "train.recompute=full"}));
  add("tied embeddings, odd widths", {model(tied), "train.recompute=selective"});
  add("experts, of which a token takes 2 of 5",
      with(roomy, {model({.type = "mixtral",
                          .architecture = "MixtralForCausalLM",
                          .more = ", num_local_experts: 5, num_experts_per_tok: 2"}),
                   "train.recompute=full"}));
  add("experts, weights not renormalised",
      with(roomy, {model({.type = "qwen3_moe",
                          .architecture = "Qwen3MoeForCausalLM",
                          .more = ", num_experts: 8, num_experts_per_tok: 3, moe_intermediate_size: 20"}),
                   "train.micro_batch_tokens=64"}));
  const std::string deepseek =
      "model={{model_type: {}, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 3, num_attention_heads: 4, "
      "first_k_dense_replace: 1, kv_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, moe_intermediate_size: "
      "12, "
      "n_routed_experts: 6, num_experts_per_tok: 2, vocab_size: 33, max_position_embeddings: 256, initializer_range: "
      "0.2, "
      "bos_token_id: 1, eos_token_id: 2{}}}";
  add("DeepSeek-V3: latents, groups, a shared expert, several key blocks",
      with(roomy, {fmt::format(fmt::runtime(deepseek), "deepseek_v3",
                               ", q_lora_rank: 9, v_head_dim: 5, n_shared_experts: 1, n_group: 3, topk_group: 2"),
                   long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2", "train.recompute=full"}));
  add("DeepSeek-V2: queries from the stream, wide values, yarn",
      with(roomy,
           {fmt::format(fmt::runtime(deepseek), "deepseek_v2",
                        ", v_head_dim: 12, n_shared_experts: 2, routed_scaling_factor: 1.5, rope_scaling: {rope_type: "
                        "yarn, factor: 4.0, mscale: 1.0, mscale_all_dim: 0.7, original_max_position_embeddings: 16}"),
            "rollout.max_prefill_tokens=5", "train.recompute=selective"}));
  add("long responses, several key blocks",
      with(roomy, {model(qwen3), long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2"}));
  add("a window, in and across key blocks",
      with(roomy, {model({.type = "mistral", .architecture = "MistralForCausalLM", .more = ", sliding_window: 20"}),
                   long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2"}));
  add("Gemma-2: windows in every other layer, caps, norms behind attention and MLP",
      with(roomy,
           {model({.type = "gemma2",
                   .architecture = "Gemma2ForCausalLM",
                   .tied = true,
                   .more = ", sliding_window: 20, query_pre_attn_scalar: 6, attn_logit_softcapping: 2.0, "
                           "final_logit_softcapping: 5.0"}),
            long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2", "train.recompute=selective"}));
  add("GLM-4.5: heads that turn in part, head norms, a shared expert",
      with(roomy,
           {model({.type = "glm4_moe",
                   .architecture = "Glm4MoeForCausalLM",
                   .more = ", n_routed_experts: 6, num_experts_per_tok: 2, moe_intermediate_size: 12, "
                           "first_k_dense_replace: 1, attention_bias: true, use_qk_norm: true, "
                           "partial_rotary_factor: 0.67"}),
            long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2", "train.recompute=selective"}));
  add("gpt-oss: sinks, windows, biases of experts, clamped gates",
      with(roomy,
           {model({.type = "gpt_oss",
                   .architecture = "GptOssForCausalLM",
                   .more = ", num_local_experts: 6, num_experts_per_tok: 2, sliding_window: 20, swiglu_limit: 0.5"}),
            long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2", "train.recompute=full"}));
  add("gpt-oss, in chunks",
      with(roomy, {model({.type = "gpt_oss",
                          .architecture = "GptOssForCausalLM",
                          .more = ", num_local_experts: 6, num_experts_per_tok: 2, sliding_window: 7"}),
                   "rollout.max_prefill_tokens=5", "rollout.block_tokens=2"}));
  add("GPT-2",
      with(roomy,
           {"model={model_type: gpt2, n_embd: 24, n_layer: 3, n_head: 4, n_inner: 40, n_positions: 256, "
            "vocab_size: 33, initializer_range: 0.2, bos_token_id: 1, eos_token_id: 2}",
            long_prompts, "rollout.max_running_requests=5", "algorithm.prompts=2", "train.recompute=selective"}));
  add("biases everywhere in attention, yarn",
      with(roomy, {model({.more = ", attention_bias: true, rope_scaling: {rope_type: yarn, factor: 4.0, "
                                  "original_max_position_embeddings: 16}"})}));
  add("one prompt per prefill", with(roomy, {"rollout.max_prefill_tokens=5", "rollout.block_tokens=2"}));
  add("preemption",
      {"rollout.kv_cache_tokens=24", "rollout.max_running_requests=6", "workload.response_tokens={mean: 9, max: 10}"});
  add("logits in chunks", {"train.loss_chunk_tokens=7"});
  add("many micro-batches", {"train.micro_batch_tokens=24", "algorithm.mini_batches=2"});
  add("a pass for the old log-probs",
      with(roomy, {model(wide), "algorithm.old_logprobs=true", "algorithm.reference=true"}));
  CpuOptions two_threads;
  two_threads.compute_threads = 2;
  CHECK(run_cases(1, cases, gap) == "");
  CHECK(run_cases(1, cases, gap, two_threads) == "");
}

TEST_CASE("fp32 log-probs of rollout and training are equal to the bit, 2 rank(s)") {
  CHECK(run_cases(2,
                  {{"sharded training", tiny_scenario(2, 1)},
                   {"engines in two stages",
                    tiny_scenario(2, 1, {"rollout.layout.pp=2", "rollout.layout.dp=1", "model.num_hidden_layers=4"})},
                   {"old log-probs, small micro-batches",
                    tiny_scenario(
                        2, 1, {"algorithm.old_logprobs=true", "train.micro_batch_tokens=32", "train.recompute=full"})}},
                  gap) == "");
}

namespace {

/// As `gap`, of what is rounded to bf16, which prefill, decode and training sum in orders of their own; "" is no
/// garbage.
std::string small_gap(const Outcome& o) {
  for (const StepMetrics& m : o.measured.metrics)
    if (const double most = m.values.at("rollout/logprob_gap_max"); !(most < 0.05))
      return fmt::format("step {}: gap {:.3g} at most", m.step, most);
  return o.measured.metrics.empty() ? "no step has metrics" : "";
}

}  // namespace

TEST_CASE("log-probs are training's where an engine's weights are packed") {
  // Prompts of 5 tokens: up to 12 of them in a prefill, more rows than a product reads one by one.
  const auto packed = [](int world, const char* dtype, const std::vector<std::string>& more, bool tied) {
    std::vector<std::string> sets = {packable_model(tied), fmt::format("train.precision.params={}", dtype),
                                     "rollout.max_prefill_tokens=60", "rollout.max_running_requests=12",
                                     "rollout.kv_cache_tokens=256"};
    sets.insert(sets.end(), more.begin(), more.end());
    const Case out{fmt::format("{} {}", dtype, fmt::join(more, " ")), tiny_scenario(world, 1, sets)};
    if (dtype == std::string("fp32")) CHECK(packs(*lower(out.scenario)));
    return out;
  };
  const std::vector<std::string> of_one_sync = {"rollout.sleep_level=1", "sync.every=2", "optimizer.lr=0", "steps=4"},
                                 stages = {"rollout.layout.pp=2", "rollout.layout.dp=1"};
  CHECK(run_cases(1, {packed(1, "fp32", {}, false), packed(1, "fp32", of_one_sync, true)}, gap) == "");
  CHECK(run_cases(2, {packed(2, "fp32", stages, true)}, gap) == "");
  CHECK(run_cases(1, {packed(1, "bf16", {}, false), packed(1, "bf16", of_one_sync, true)}, small_gap) == "");
  CHECK(run_cases(2, {packed(2, "bf16", stages, true)}, small_gap) == "");

  // All of it fails where products read packed weights as rows.
  const auto as_rows = [](Case job) {
    job.mutate = [](Plan& plan) {
      for (Program& program : plan.programs)
        for (Body& body : program.bodies)
          for (Op& op : body.ops) std::erase_if(op.attrs, [](const auto& a) { return a.first == Attr::prepacked; });
    };
    return job;
  };
  CHECK(run_cases(1, {as_rows(packed(1, "fp32", {}, false))}, gap) != "");
  const Case bf16 = packed(1, "bf16", {}, false);
  CHECK((run_cases(1, {as_rows(bf16)}, small_gap) != "") == packs(*lower(bf16.scenario)));
}
