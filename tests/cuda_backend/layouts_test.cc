// One iteration of two ranks or four in layouts, dtypes and models of all kinds: beside the simulator, and in fp32
// beside one rank of the CPU backend.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <regex>

#include "spec/router_loss.h"
#include "tests/cuda_backend/beside_cpu.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("layouts, dtypes and models: bytes and calls as simulated, in fp32 one CPU rank's tokens and figures") {
  const std::string qwen3 =
      "model={model_type: qwen3, architectures: [Qwen3ForCausalLM], hidden_size: 8, intermediate_size: 8, "
      "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4, vocab_size: 17, "
      "max_position_embeddings: 32, rms_norm_eps: 1.0e-6, rope_theta: 10000.0, tie_word_embeddings: true, "
      "initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}";
  const std::string qwen2 =
      "model={model_type: qwen2, architectures: [Qwen2ForCausalLM], hidden_size: 8, intermediate_size: 12, "
      "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 4, vocab_size: 19, "
      "max_position_embeddings: 32, rms_norm_eps: 1.0e-6, rope_theta: 10000.0, tie_word_embeddings: false, "
      "initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}";
  // Heads of eight numbers in bf16: attention in tiles.
  const std::string mixtral =
      "model={model_type: mixtral, architectures: [MixtralForCausalLM], hidden_size: 16, intermediate_size: 12, "
      "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, vocab_size: 17, "
      "max_position_embeddings: 32, rms_norm_eps: 1.0e-6, rope_theta: 10000.0, tie_word_embeddings: false, "
      "initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2, num_local_experts: 3, num_experts_per_tok: 2}";
  const std::string gpt2 =
      "model={model_type: gpt2, architectures: [GPT2LMHeadModel], n_embd: 8, n_inner: 12, n_layer: 1, n_head: 2, "
      "n_positions: 32, vocab_size: 17, initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}";
  const std::string latents =
      "model={model_type: deepseek_v3, architectures: [DeepseekV3ForCausalLM], hidden_size: 16, intermediate_size: 12, "
      "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 17, max_position_embeddings: "
      "32, rms_norm_eps: 1.0e-6, rope_theta: 10000.0, tie_word_embeddings: false, initializer_range: 0.1, "
      "bos_token_id: 1, eos_token_id: 2, q_lora_rank: 8, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, "
      "v_head_dim: 8, moe_intermediate_size: 8, n_routed_experts: 4, num_experts_per_tok: 2, n_shared_experts: 1, "
      "n_group: 2, topk_group: 1, first_k_dense_replace: 2, routed_scaling_factor: 2.5}";
  const std::string half_dense =
      std::regex_replace(latents, std::regex("first_k_dense_replace: 2"), "first_k_dense_replace: 1");
  const std::string adapters = "train.lora={rank: 3, alpha: 6, targets: all-linear}";
  const std::string four_ranks = "cluster.ranks_per_device=4";
  const std::string parts = "rollout.layout={tp: 1, cp: 2, dp: 1}";
  const std::string alone = "rollout.layout.tp=1", two = "rollout.layout.dp=2";
  const std::string bf16 = "train.precision.params=bf16", engine_bf16 = "rollout.dtype=bf16";
  const std::string balance = "train.router_aux_loss_coef=0.2", z = "train.router_z_loss_coef=0.05";
  const std::string narrow = "train.precision.grads=bf16";
  // A sample for each micro-batch of a pipeline.
  const std::string four_batches = "train.micro_batch_tokens=5", two_layers = "model.num_hidden_layers=2";
  // Samples' rewards differ, so that there are gradients, with seed 9, or, of qwen3 and latents, with this one.
  const std::string seed = "seed=7";
  const std::vector<Sets> variants = {
      {bf16, engine_bf16},
      {bf16, engine_bf16, qwen3, alone, two},
      {qwen2, alone, two},
      {"train.engine=ddp"},
      {"train.engine=zero1", bf16, engine_bf16},
      {"train.engine=zero2", alone, two},
      {"train.engine=fsdp1"},
      {"train.layout.fsdp=1"},
      {"train.recompute=full", "sync.transport=collective"},
      {"train.recompute=selective", "train.offload=none"},
      {"algorithm.reference=true", "algorithm.kl_coef=0.1", "algorithm.mini_batches=2"},
      {"rollout.max_running_requests=1", "rollout.kv_cache_tokens=8", "rollout.max_prefill_tokens=3", alone, two},
      {"train.loss_chunk_tokens=4", "steps=2"},
      {"sync.bucket_mib=1", "sync.verify=false"},
      {"rollout.temperature=0.7", "rollout.top_k=3", "rollout.top_p=0.9"},
      {mixtral, alone, two, balance, z},
      {mixtral, "train.layout={dp: 1, tp: 2, etp: 2}", "train.micro_batch_tokens=10", balance, z},
      {mixtral, bf16, engine_bf16},
      // Gradients of weights, and what is reduced of them, in bf16: added up in bf16 or, by FSDP, in fp32.
      {"train.engine=ddp", bf16, engine_bf16, narrow, "train.micro_batch_tokens=10"},
      {mixtral, bf16, engine_bf16, narrow, balance, z},
      // A copy of a token to each rank that has some of its experts.
      {mixtral, "model.num_local_experts=4", "train.layout.ep=2", "train.expert_dispatch=per-rank",
       "sync.transport=collective"},
      {"train.layout={dp: 1, tp: 2}", qwen3, seed},
      {"train.layout={dp: 1, tp: 2, sp: true}", qwen3, seed},
      {"train.layout={dp: 1, ulysses: 2}", qwen3, seed},
      {"train.layout={dp: 1, cp: 2}"},
      {"train.layout={dp: 1, cp: 2}", "train.context_exchange=all-gather"},
      {"train.layout={dp: 1, cp: 2}", "train.context_exchange=all-gather", bf16, engine_bf16},
      {"train.layout={dp: 1, pp: 2}", two_layers, four_batches},
      {"train.layout={dp: 1, pp: 2, vpp: 2}", "train.pipeline_schedule=interleaved", "model.num_hidden_layers=4",
       four_batches},
      {"train.layout={dp: 1, pp: 2}", "train.pipeline_schedule=zero-bubble", two_layers, four_batches},
      {"rollout.layout={tp: 2, attention_dp: 2, dp: 1}", "rollout.kv_cache_tokens=64", qwen3, seed},
      // Each rank of the engine has every other token of a sequence: by rows, and in tiles.
      {parts, qwen3, seed},
      {mixtral, parts, bf16, engine_bf16},
      // Four ranks: half of each of two experts; layers that a pipeline's ranks keep whole over its micro-batches.
      {mixtral, four_ranks, "model.num_local_experts=4", "model.num_attention_heads=4", "model.head_dim=4",
       "train.layout={dp: 1, tp: 4, ep: 2, etp: 2}", "rollout.layout={tp: 1, dp: 4}"},
      {"train.layout={dp: 2, pp: 2}", four_ranks, "train.reshard_after_forward=false", two_layers, four_batches,
       "rollout.layout={tp: 2, dp: 2}"},
      // Experts in the second stage alone: of the first one's ranks no op is on the stream of their exchanges.
      {half_dense, four_ranks, "train.layout={dp: 2, pp: 2, ep: 2}", four_batches, "rollout.layout={tp: 1, dp: 4}",
       "seed=5"},
      // An engine of two groups that have sequences of their own, and columns of their own experts.
      {mixtral, four_ranks, "model.num_local_experts=4", "model.num_attention_heads=4", "model.head_dim=4",
       "train.layout={dp: 4}", "rollout.layout={tp: 4, attention_dp: 2, ep: 2, dp: 1}", "rollout.kv_cache_tokens=64"},
      // Adapters of other families.
      {gpt2, adapters, alone, two},
      {latents, adapters, alone, two, seed},
      // Values that are narrower than keys, between all tokens of some heads and all heads of some tokens.
      {latents, "train.layout={dp: 1, ulysses: 2}", alone, two, seed},
      // Of each expert, whose rows come from both ranks.
      {mixtral, "model.num_local_experts=4", "train.layout.ep=2", adapters, alone, two},
  };
  std::uint64_t ran = 0;
  int compared = 0;
  for (Sets sets : variants) {
    sets.insert(sets.begin(), "seed=9");
    INFO(fmt::format("{}", fmt::join(sets, " ")));
    const auto job = planned(load_tiny_job(sets));
    if (!job) continue;
    const Iteration it = checked_iteration(*job, ++ran);
    if (!it.went_well() || job->scenario.train.precision.params != DType::f32) continue;
    const auto alone_job = planned(load_tiny_job(on_one_rank(sets)));
    if (!alone_job) continue;
    const Iteration one = run_on_cpu(alone_job->plan, alone_job->scenario);
    CHECK_THAT(one.text(), Catch::Equals(""));
    CHECK(one.trace.metrics.at(0).values.at("actor/grad_norm") > 0.1);
    check_like(it, one);
    if (router_losses(job->scenario).any()) CHECK(one.trace.metrics.at(0).values.at("actor/router_loss") > 0.01);
    ++compared;
  }
  CAPTURE(compared);
  CHECK(compared >= 25);
}
