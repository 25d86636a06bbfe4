// Families and experts over ranks: an iteration beside the CPU backend's, of scenarios/*-cpu.yaml, shortened to four
// samples on two ranks; and promises that hold between kernels.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "backends/cuda/cuda_backend.h"
#include "lowering/lower.h"
#include "rl/sft_driver.h"
#include "tests/cuda_backend/iteration.h"
#include "tests/cuda_backend/processes.h"
#include "tests/cuda_backend/runs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// What makes a scenario of that folder a matter of seconds on the double. Experts and heads keep their numbers.
const char* const shorter =
    "--set steps=1 --set cluster.ranks_per_device=2 --set train.layout.dp=2 "
    "--set train.layout.tp=1 --set train.layout.sp=false --set train.micro_batch_tokens=24 --set rollout.layout.tp=2 "
    "--set rollout.layout.dp=1 --set rollout.max_running_requests=4 --set rollout.max_prefill_tokens=20 "
    "--set task.digits=2 --set workload.prompt_tokens.mean=4 --set workload.prompt_tokens.max=4 "
    "--set algorithm.prompts=2 --set algorithm.samples_per_prompt=2 --set workload.response_tokens.mean=3 "
    "--set workload.response_tokens.max=3 --samples-every 1 --json";

}  // namespace

TEST_CASE(
    "every family on the double: bytes and calls as simulated, the CPU backend's tokens, its losses to rounding") {
  const Folder folder;
  struct Family {
    const char *file, *more;
  };
  // Seeds with which rewards differ, so that there are gradients.
  for (const Family& f : {Family{"gemma2", "--set seed=7 --set model.num_hidden_layers=2"},
                          {"gpt2", "--set seed=7 --set model.n_layer=1"},
                          {"gpt-oss", "--set seed=7 --set model.num_hidden_layers=2 --set train.layout.etp=1"},
                          {"deepseek", "--set seed=7 --set model.num_hidden_layers=2 --set train.layout.etp=1"},
                          {"lora", "--set seed=8 --set model.num_hidden_layers=1"},
                          {"expert-rounds", "--set seed=2 --set model.num_hidden_layers=1"}}) {
    const std::string options = fmt::format("scenarios/{}-cpu.yaml {} {}", f.file, shorter, f.more),
                      ours = fmt::format("{}.fake", f.file), theirs = fmt::format("{}.cpu", f.file);
    const Ended cpu = folder.run(theirs, options), fake = folder.run(ours, options + " --backend cuda-fake");
    INFO(f.file << cpu.err << fake.err);
    REQUIRE(cpu.code == 0);
    REQUIRE(fake.code == 0);
    CHECK(json_from<Json>(fake.out)["equal"] == true);  // P1, P2
    CHECK(tokens_of(folder, ours).size() == 4);
    CHECK(tokens_of(folder, ours) == tokens_of(folder, theirs));
    const auto figures = folder.lines(theirs, "metrics.jsonl");
    CHECK(figures.at(0)["actor/grad_norm"].get<double>() > 0.1);
    check_figures(folder.lines(ours, "metrics.jsonl"), figures, 2e-5);
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
