// Families and experts over ranks: an iteration beside one CPU rank's, of scenarios/*-cpu.yaml, shortened to four
// samples on two ranks; and promises that hold between kernels.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/cuda_backend/beside_cpu.h"
#include "tests/paths.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("every family on the double: bytes and calls as simulated, one CPU rank's tokens and figures") {
  struct Family {
    std::string file;
    Sets more;
  };
  // Seeds with which rewards differ, so that there are gradients.
  for (const Family& f : {Family{"gemma2", {"seed=7", "model.num_hidden_layers=2"}},
                          {"gpt2", {"seed=7", "model.n_layer=1"}},
                          {"gpt-oss", {"seed=7", "model.num_hidden_layers=2", "train.layout.etp=1"}},
                          {"deepseek", {"seed=7", "model.num_hidden_layers=2", "train.layout.etp=1"}},
                          {"engine-context", {"seed=2", "rollout.layout={tp: 1, cp: 2, dp: 1}"}},
                          {"lora", {"seed=8", "model.num_hidden_layers=1"}},
                          {"expert-rounds", {"seed=2", "model.num_hidden_layers=1"}}}) {
    INFO(f.file);
    Sets sets = shortened();
    sets.insert(sets.end(), f.more.begin(), f.more.end());
    const auto load = [&](const Sets& how) {
      return load_scenario(fmt::format("{}/scenarios/{}-cpu.yaml", source_folder, f.file), how);
    };
    const auto job = planned(load(sets)), one_job = planned(load(on_one_rank(sets)));
    if (!job || !one_job) continue;
    const Iteration it = checked_iteration(*job), one = run_on_cpu(one_job->plan, one_job->scenario);
    CHECK_THAT(one.text(), Catch::Equals(""));
    CHECK(one.trace.metrics.at(0).values.at("actor/grad_norm") > 0.1);
    check_like(it, one);
  }
}

namespace {

/// A model of two layers with heads of eight numbers, which go by tiles in bf16.
std::string model(const std::string& type, const std::string& architecture, const std::string& more) {
  return fmt::format(
      "model={{model_type: {}, architectures: [{}], hidden_size: 16, intermediate_size: 12, num_hidden_layers: 2, "
      "num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 17, max_position_embeddings: 32, rms_norm_eps: "
      "1.0e-6, rope_theta: 10000.0, tie_word_embeddings: false, initializer_range: 0.1, bos_token_id: 1, eos_token_id: "
      "2, {}}}",
      type, architecture, more);
}

const std::vector<std::string>& families() {
  static const std::vector<std::string> all = {
      model("gemma2", "Gemma2ForCausalLM",
            "head_dim: 8, sliding_window: 3, query_pre_attn_scalar: 8, attn_logit_softcapping: 2.0, "
            "final_logit_softcapping: 2.0"),
      model("gpt_oss", "GptOssForCausalLM",
            "head_dim: 8, sliding_window: 3, num_local_experts: 2, num_experts_per_tok: 1, swiglu_limit: 7.0, "
            "rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8}"),
      model("deepseek_v3", "DeepseekV3ForCausalLM",
            "q_lora_rank: 8, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8, "
            "moe_intermediate_size: 8, n_routed_experts: 4, num_experts_per_tok: 2, n_shared_experts: 1, n_group: 2, "
            "topk_group: 1, first_k_dense_replace: 1, routed_scaling_factor: 2.5")};
  return all;
}

}  // namespace

TEST_CASE("of families with windows, caps, sinks and latents, too, log-probs are equal to the bit (P5)") {
  // In fp32 by rows, in bf16 in tiles. Where an engine is one rank, as training's are.
  for (const std::string& family : families())
    for (const char* dtype : {"fp32", "bf16"}) {
      INFO(dtype << " " << family);
      const auto scenario =
          load_tiny_job({family, "rollout.layout.tp=1", "rollout.layout.dp=2",
                         fmt::format("train.precision.params={}", dtype), fmt::format("rollout.dtype={}", dtype),
                         "workload.response_tokens.mean=4", "workload.response_tokens.max=4"});
      if (!scenario) FAIL(render(scenario.error()));
      const auto plan = lower(*scenario);
      REQUIRE(plan);
      const Iteration it = run_iteration(*plan, *scenario);
      REQUIRE_THAT(it.text(), Catch::Equals(""));
      CHECK_THAT(it.numbers, Catch::Contains("rollout/logprob_gap_max 0x0p+0"));
      CHECK(it.launches.contains(std::string(dtype) == "bf16" ? "tiled_attention_64" : "attention_f32"));
    }
}

TEST_CASE("engines whose ranks hold parts of sequences: one CPU rank's tokens, with windows, sinks and latents") {
  for (const std::string& family : families()) {
    INFO(family);
    const Sets sets = {family, "rollout.layout={tp: 1, cp: 2, dp: 1}", "workload.response_tokens.mean=4",
                       "workload.response_tokens.max=4"};
    const auto job = planned(load_tiny_job(sets)), one_job = planned(load_tiny_job(on_one_rank(sets)));
    if (!job || !one_job) continue;
    const Iteration it = checked_iteration(*job), one = run_on_cpu(one_job->plan, one_job->scenario);
    CHECK_THAT(one.text(), Catch::Equals(""));
    CHECK(it.launches.contains("attention_sinks_part_f32"));
    check_like(it, one);
  }
}

TEST_CASE(
    "experts over ranks: the numbers of ranks that are threads, over NCCL's double, in one round and in several") {
  const std::string experts =
      model("mixtral", "MixtralForCausalLM", "head_dim: 8, num_local_experts: 4, num_experts_per_tok: 2");
  for (const char* capacity : {"train.expert_capacity=4.0", "train.expert_capacity=0.5"}) {
    INFO(capacity);
    const Scenario scenario = tiny_job({experts, capacity, "train.layout.ep=2", "sync.transport=collective"});
    const auto plan = lower(scenario);
    REQUIRE(plan);
    const Iteration threads = run_iteration(*plan, scenario);
    REQUIRE_THAT(threads.text(), Catch::Equals(""));
    REQUIRE_THAT(threads.numbers, Catch::Contains("loss"));
    CHECK(threads.launches.contains("expert_arrivals"));
    const auto said = numbers_over_nccl(*plan, scenario);
    CHECK(said[0] == threads.numbers);
    CHECK(said[1].empty());
  }
}
