// train.lora: what it says of a model, and what it cannot say.
#include <catch2/catch.hpp>

#include "spec/loader.h"
#include "spec/validate.h"

using namespace hotbunk;

namespace {

const char* const dense_text = R"(
model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, head_dim: 6, vocab_size: 33, max_position_embeddings: 64}
cluster: {gpu: local-cpu}
train: {micro_batch_tokens: 64}
rollout: {engine: hotbunk}
workload: {prompt_tokens: {mean: 5, max: 5}, response_tokens: {mean: 4, max: 6}}
)";

Result<Scenario> with_lora(const std::vector<std::string>& sets) {
  return load_scenario_text(dense_text, "s.yaml", sets);
}

/// Latent attention; with so many experts in each layer but the first, or dense MLPs (0).
std::string latent(int experts) {
  return "model={model_type: deepseek_v3, hidden_size: 24, intermediate_size: 40, moe_intermediate_size: 16, "
         "num_hidden_layers: 2, num_attention_heads: 4, q_lora_rank: 10, kv_lora_rank: 12, qk_nope_head_dim: 6, "
         "qk_rope_head_dim: 2, v_head_dim: 5, vocab_size: 33, max_position_embeddings: 64, n_group: 1, topk_group: 1, "
         "num_experts_per_tok: 2, first_k_dense_replace: 1, n_routed_experts: " +
         std::to_string(experts) + "}";
}

void check_refused(const std::vector<std::string>& sets, const std::string& code, const std::string& part) {
  INFO(part);
  const auto s = with_lora(sets);
  REQUIRE_FALSE(s);
  CHECK(s.error().front().code == code);
  CHECK_THAT(render(s.error()), Catch::Contains(part));
}

}  // namespace

TEST_CASE("adapters by PEFT's names: A (rank, in) and B (out, rank) of each matrix that has one") {
  const auto s = with_lora({"train.lora={rank: 3, alpha: 6, targets: [q_proj, down_proj]}"});
  REQUIRE(s);
  const ModelSpec& m = s->model;
  CHECK(m.lora.factor() == 2.0);
  const std::vector<ParamSpec> all = adapters_of(m);
  REQUIRE(all.size() == 8);
  CHECK(all[0].name == "model.layers.0.self_attn.q_proj.lora_A.weight");
  CHECK(all[0].shape == std::vector<std::int64_t>{3, 24});
  CHECK(all[1].name == "model.layers.0.self_attn.q_proj.lora_B.weight");
  CHECK(all[1].shape == std::vector<std::int64_t>{24, 3});
  CHECK(all[6].name == "model.layers.1.mlp.down_proj.lora_A.weight");
  CHECK(all[6].shape == std::vector<std::int64_t>{3, 40});
  CHECK((m.adapts(ParamRole::q_proj) && !m.adapts(ParamRole::k_proj) && !m.adapts(ParamRole::embedding)));
  CHECK((m.trains(ParamRole::q_lora_a) && !m.trains(ParamRole::q_proj) && !m.trains(ParamRole::input_norm)));
  CHECK(base_of(m).trains(ParamRole::q_proj));
  CHECK(adapters_of(base_of(m)).empty());
  CHECK(adapters_of(with_lora({"train.lora.rank=3"})->model).size() == 2 * 2 * 7);
}

TEST_CASE("adapters of latent attention and of one module for q, k and v, by the names of transformers' modules") {
  const auto names = [](const std::string& targets, const std::string& model) {
    const auto s = with_lora({"train.lora={rank: 3, targets: " + targets + "}", model});
    if (!s) FAIL(render(s.error()));
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> out;
    for (const ParamSpec& p : adapters_of(s->model))
      if (p.layer == 0) out.emplace_back(p.name, p.shape);
    return out;
  };
  using Names = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;
  // 4 heads of 6 + 2, of which 2 turn, and 5 of values; latents of 10 and 12.
  const std::string a = "model.layers.0.self_attn.";
  CHECK(names("[q_b_proj, kv_a_proj_with_mqa, kv_b_proj]", latent(0)) ==
        Names{{a + "q_b_proj.lora_A.weight", {3, 10}},
              {a + "q_b_proj.lora_B.weight", {32, 3}},
              {a + "kv_a_proj_with_mqa.lora_A.weight", {3, 24}},
              {a + "kv_a_proj_with_mqa.lora_B.weight", {14, 3}},
              {a + "kv_b_proj.lora_A.weight", {3, 12}},
              {a + "kv_b_proj.lora_B.weight", {44, 3}}});
  CHECK(names("all-linear", latent(0)).size() == 2 * 8);
  const std::string h = "transformer.h.0.attn.";
  CHECK(names("[c_attn]",
              "model={model_type: gpt2, n_embd: 24, n_layer: 2, n_head: 4, n_positions: 64, vocab_size: 33}") ==
        Names{{h + "c_attn.lora_A.weight", {3, 24}},
              {h + "c_attn.q.lora_B.weight", {24, 3}},
              {h + "c_attn.k.lora_B.weight", {24, 3}},
              {h + "c_attn.v.lora_B.weight", {24, 3}}});
}

TEST_CASE("adapters of experts: each has its own, under the name of its module") {
  const std::string mixtral =
      "model={model_type: mixtral, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, "
      "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 33, num_local_experts: 4, "
      "max_position_embeddings: 64}";
  const auto s = with_lora({"train.lora={rank: 3, targets: [w2]}", mixtral});
  if (!s) FAIL(render(s.error()));
  const std::vector<ParamSpec> all = adapters_of(s->model);
  REQUIRE(all.size() == 2 * 4 * 2);
  CHECK(all[2].name == "model.layers.0.block_sparse_moe.experts.1.w2.lora_A.weight");
  CHECK((all[2].shape == std::vector<std::int64_t>{3, 40} && all[2].expert == 1));
  CHECK((all[3].shape == std::vector<std::int64_t>{24, 3} && all[3].expert == 1));
  CHECK(adapters_of(with_lora({"train.lora.rank=3", mixtral})->model).size() == 2 * 2 * (4 + 4 * 3));
  // One name is of a dense layer's MLP, of each expert's, and of the shared one: 1 layer of each kind, 4 experts.
  std::string shared = latent(4);
  shared.insert(shared.size() - 1, ", n_shared_experts: 2");
  const auto latents = with_lora({"train.lora={rank: 3, targets: [up_proj]}", shared});
  if (!latents) FAIL(render(latents.error()));
  CHECK(adapters_of(latents->model).size() == 2 * (1 + 4 + 1));
  // Ranks that share an expert's columns each have A or B whole.
  CHECK(with_lora({"train.lora={rank: 3, targets: [w2]}", mixtral, "train.layout={tp: 2, etp: 2}",
                   "cluster.ranks_per_device=2", "rollout.layout.tp=2"}));
  check_refused({"train.lora={rank: 3, targets: [w2]}", mixtral, "rollout.engine=vllm"}, "E232",
                "adapters of experts are planned only in what is executed");
}

TEST_CASE("adapters are in the resolved form where they are set, whatever stands first in the file") {
  CHECK(resolved_yaml(*with_lora({})).find("lora") == std::string::npos);
  const auto s = with_lora({"train.lora={rank: 3, targets: [q_proj, v_proj]}"});
  REQUIRE(s);
  const std::string text = resolved_yaml(*s);
  CHECK_THAT(text, Catch::Contains("rank: 3") && Catch::Contains("targets: q_proj-v_proj"));
  const auto again = load_scenario_text(text, "again.yaml");
  REQUIRE(again);
  CHECK(*again == *s);
  const auto late = load_scenario_text(
      "train: {lora: {rank: 5}, micro_batch_tokens: 2048}\nmodel: qwen2.5-0.5b\n"
      "cluster: {gpu: local-cpu}\nrollout: {engine: hotbunk}\n",
      "late.yaml");
  if (!late) FAIL(render(late.error()));
  CHECK(late->model.lora.rank == 5);
}

TEST_CASE("adapters beside what nothing executes are a scenario, and no part of what is executed") {
  for (const auto& [set, reason] : {std::pair{"train.engine=megatron", "train.engine megatron"},
                                    {"rollout.engine=vllm", "rollout.engine vllm"},
                                    {"transition=auto", "transition auto"}}) {
    INFO(set);
    const auto s = with_lora({"train.lora={rank: 3}", set});
    if (!s) FAIL(render(s.error()));
    const auto reasons = unsupported_to_execute(*s);
    REQUIRE_FALSE(reasons.empty());
    CHECK_THAT(reasons.front(), Catch::Contains(reason));
  }
  CHECK(unsupported_to_execute(*with_lora({"train.lora={rank: 3}"})).empty());
  CHECK(unsupported_to_execute(*with_lora({"train.lora={rank: 3}", "train.engine=fsdp1"})).empty());
  CHECK(unsupported_to_execute(*with_lora({"train.frozen=['*.0.*']", "train.engine=fsdp1"})).empty());
}

TEST_CASE("adapters that cannot be are refused by name, with what could be") {
  check_refused({"train.lora={rank: 3, targets: [q_proj, q_porj]}"}, "E232", "no matrix is called 'q_porj'");
  check_refused({"train.lora={rank: 3, targets: [q_proj, q_proj]}"}, "E232", "names q_proj twice");
  check_refused({"train.lora={rank: 3, targets: []}"}, "E232", "names no matrix");
  check_refused({"train.lora={rank: -1}"}, "E206", "train.lora.rank is -1");
  check_refused({"train.lora={rank: 3, alfa: 2}"}, "E202", "did you mean train.lora.alpha?");
  check_refused({"train.lora={alpha: 10}"}, "E227", "train.lora.rank 0 has none");
  check_refused({"train.lora={targets: [q_proj]}"}, "E227", "train.lora.rank 0 has none");
  const std::string gpt2 =
      "model={model_type: gpt2, n_embd: 24, n_layer: 2, n_head: 4, n_positions: 64, vocab_size: 33}";
  check_refused({"train.lora={rank: 3, targets: [q_proj]}", gpt2}, "E232",
                "all-linear, or some of c_attn, c_proj, c_fc");
  check_refused({"train.lora={rank: 3, targets: [k_proj]}", latent(0)}, "E232", "no matrix is called 'k_proj'");
  // The reference is the model itself, which has to be awake.
  check_refused({"train.lora={rank: 3}", "algorithm.reference=true", "rollout.sleep=true",
                 "transition=[sleep_optimizer, wake_rollout, sync, sleep_train, wake_kv, rollout, sleep_rollout, "
                 "wake_reference, reference, wake_train]"},
                "E225", "the reference's log-probs come before the parameters");
}
