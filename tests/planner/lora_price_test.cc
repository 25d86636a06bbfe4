// Adapters in the closed forms, which price what nothing executes: held to the plan where there is one.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "planner/answers/plan_answer.h"
#include "planner/rl/engine_parts.h"
#include "tests/planner/pricers.h"

using namespace hotbunk;

namespace {

/// A llama whose sizes divide by all that is asked of it here, on 4 GPUs: H = 1024, I = 2816, 8 heads of 128 and 4 of
/// keys, L = 6, V = 32000, a rank of 16.
std::string llama(const char* more) {
  return fmt::format(
      "name: adapters\n"
      "model: {{model_type: llama, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 6,"
      " num_attention_heads: 8, num_key_value_heads: 4, head_dim: 128, vocab_size: 32000,"
      " max_position_embeddings: 4096, tie_word_embeddings: false}}\n"
      "cluster: {{gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 4}}\n"
      "algorithm: {{prompts: 16, samples_per_prompt: 4, reference: true}}\n"
      "workload: {{prompt_tokens: {{mean: 512, max: 512, distribution: fixed}}, response_tokens: {{mean: 512, max: 512,"
      " distribution: fixed}}}}\n"
      "{}",
      more);
}
std::string executed(const char* engine, int dp, int tp) {
  return llama(fmt::format("train: {{engine: {}, layout: {{dp: {}, tp: {}}}, micro_batch_tokens: 8192}}\n"
                           "rollout: {{engine: hotbunk, layout: {{tp: 1, dp: 4}}, max_running_requests: 16}}\n",
                           engine, dp, tp)
                   .c_str());
}

constexpr double H = 1024, I = 2816, A = 1024, K = 512, V = 32000, L = 6, R = 16;
constexpr double frozen = L * (2 * H * A + 2 * H * K + 3 * H * I + 2 * H) + 2 * V * H + H;
constexpr double adapters = L * R * ((H + A) + 2 * (H + K) + (A + H) + 3 * (H + I));

/// What persists of training on rank 0 while it is loaded, by the plan.
double loaded(const PlanAnswer& plan) {
  const auto& by = plan.memory.device.phases[static_cast<std::size_t>(PlanPhase::load)].by_category;
  return static_cast<double>(by[static_cast<std::size_t>(Category::params)] +
                             by[static_cast<std::size_t>(Category::optimizer)]);
}

double payload(const std::vector<PlanTraffic>& traffic, OpKind kind) {
  double bytes = 0;
  for (const PlanTraffic& t : traffic)
    if (t.phase == PlanPhase::train && (t.group == "fsdp" || t.group == "data" || t.group == "replicas") &&
        t.op == kind)
      bytes += static_cast<double>(t.payload_bytes);
  return bytes;
}

/// A scenario by the closed form and by its plan.
struct Both {
  TrainPrice estimated;
  RlPrice estimate, plan;
  double state = 0, loaded = 0, gathered = 0, reduced = 0, second_model = 0;
};
Both both_of(const std::string& text, const std::vector<std::string>& sets) {
  const auto pricer = pricer_of_text(text, sets);
  const Scenario& s = pricer->scenario();
  const RlPoint p = pricer->point();
  const auto plan = plan_answer_of(s);
  REQUIRE(plan.has_value());
  const RlModel::Parts parts = pricer->rl().parts(p);
  Both out{.estimated = pricer->train().price(p.train), .estimate = pricer->price(p), .plan = {}};
  out.plan = out.estimate;
  REQUIRE(use_plan(s, pricer->train().cost(), out.plan));
  out.state = parts.train.params + parts.train.optimizer, out.loaded = loaded(*plan);
  out.second_model = parts.train.reference + parts.train.swapped_reference;
  const auto traffic = traffic_of(plan->plan, 0, expected_runs(s, p));
  out.gathered = payload(traffic, OpKind::all_gather);
  out.reduced = payload(traffic, OpKind::reduce_scatter) + payload(traffic, OpKind::all_reduce);
  return out;
}

}  // namespace

TEST_CASE("Adapters: what the closed form says of state, traffic, memory and seconds is what plans have") {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"train.lora.targets=[q_proj, v_proj]"},
      {"train.precision={params: fp32}"},
      {"train.reshard_after_forward=false"},
      {"train.recompute=full"},
      {"train.recompute=none", "train.lora.targets=[o_proj, down_proj]"}};
  for (const char* engine : {"fsdp1", "fsdp2", "zero1", "zero2", "ddp"})
    for (const int tp : {1, 2})
      for (const auto& variant : variants) {
        const bool flat = std::string(engine) == "fsdp1";
        if (flat && tp > 1) continue;
        std::vector<std::string> lora = {"train.lora={rank: 16, alpha: 32}"}, all;
        for (const std::string& set : variant) {
          lora.push_back(set);
          if (!set.starts_with("train.lora")) all.push_back(set);
        }
        // Parameters in fp32 are their own master copy under DDP, which closed forms do not know.
        if (std::string(engine) == "ddp" && !variant.empty() && variant.front() == "train.precision={params: fp32}")
          continue;
        INFO(engine << " tp " << tp << ' ' << (variant.empty() ? "" : variant.front()));
        const std::string text = executed(engine, 4 / tp, tp);
        const Both with = both_of(text, lora), without = both_of(text, all);
        // No second copy for the reference, no state of what is frozen; rows that do not divide are padded.
        CHECK(with.second_model == 0);
        CHECK(with.state == Approx(with.loaded).epsilon(2e-3));
        CHECK(with.estimated.data_reduce_payload == Approx(with.reduced).margin(128));  // sums of the norm besides
        // Closed forms gather the root as often as a layer; what adapters add is exact.
        CHECK(with.estimated.data_gather_payload - without.estimated.data_gather_payload ==
              Approx(with.gathered - without.gathered).epsilon(1e-9));
        for (const RlPhase phase : {RlPhase::train, RlPhase::old_logprobs, RlPhase::reference}) {
          const auto i = static_cast<std::size_t>(phase);
          INFO(name_of(phase) << ' ' << with.estimate.seconds[i] << " for " << with.plan.seconds[i]
                              << ", without adapters " << without.estimate.seconds[i] << " for "
                              << without.plan.seconds[i]);
          CHECK(std::abs(with.estimate.seconds[i] / with.plan.seconds[i] - 1.0) < 0.15);
        }
        // An update of our own engine is estimated 37 % too fast where tensor parallelism cuts what is trained, with
        // adapters or without. Where every rank has all of the model and would read nobody's parts, merging makes it do
        // so, which the estimate has half of.
        const auto sync = static_cast<std::size_t>(RlPhase::sync);
        const bool whole = tp == 1 && !std::string(engine).starts_with("fsdp");
        const double usual = tp == 1 ? 1.0 : without.estimate.seconds[sync] / without.plan.seconds[sync];
        INFO("sync " << with.estimate.seconds[sync] << " for " << with.plan.seconds[sync] << ", usual " << usual);
        // Of flat units every rank makes all of each whole, which the estimate does not know.
        if (!flat)
          CHECK(std::abs(with.estimate.seconds[sync] / with.plan.seconds[sync] / usual - 1.0) < (whole ? 0.6 : 0.15));
        else CHECK(with.plan.seconds[sync] > without.plan.seconds[sync]);
        if (whole) CHECK(with.estimate.seconds[sync] > without.estimate.seconds[sync]);
        // What adapters save at the fullest moment of training.
        INFO(with.estimate.train_bytes << " for " << with.plan.train_bytes << ", without adapters "
                                       << without.estimate.train_bytes << " for " << without.plan.train_bytes);
        CHECK(std::abs((without.estimate.train_bytes - with.estimate.train_bytes) -
                       (without.plan.train_bytes - with.plan.train_bytes)) < 0.07 * without.plan.train_bytes);
      }
}

TEST_CASE("Adapters of latents and of one module for q, k and v: state, traffic and seconds are what plans have") {
  const std::string latent =
      "model={model_type: deepseek_v3, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 6, "
      "num_attention_heads: 8, q_lora_rank: 512, kv_lora_rank: 256, qk_nope_head_dim: 128, qk_rope_head_dim: 64, "
      "v_head_dim: 128, vocab_size: 32000, max_position_embeddings: 4096, n_routed_experts: 0}";
  const std::string packed =
      "model={model_type: gpt2, n_embd: 1024, n_layer: 6, n_head: 8, n_positions: 4096, vocab_size: 32000}";
  // Elements of all adapters: 16 of each matrix's in + out; of q, k and v one A.
  const double of_latent = 6 * 16 *
                           ((1024 + 512) + (512 + 8 * 192) + (1024 + 320) + (256 + 8 * 256) + (1024 + 1024) +
                            3 * (1024 + 2816)),
               of_packed = 6 * 16 * ((1024 + 3 * 1024) + (1024 + 1024) + 2 * (1024 + 4096));
  for (const auto& [model, elements] : {std::pair(latent, of_latent), std::pair(packed, of_packed)})
    for (const int tp : {1, 2}) {
      INFO(model << " tp " << tp);
      const std::string text = executed("fsdp2", 4 / tp, tp), lora = "train.lora={rank: 16, alpha: 32}";
      const Both with = both_of(text, {model, lora}), without = both_of(text, {model});
      CHECK(counts_of(scenario_of_text(text, {model, lora}).model).adapters == elements);
      // Learned positions are cut over tp in the plan; the closed form repeats them, as Megatron does.
      const double repeated = tp == 2 && model == packed ? 4096 * 1024 * 2 / 2 * (1.0 - 1.0 / 2) : 0.0;
      CHECK(with.state - repeated == Approx(with.loaded).epsilon(3e-3));
      CHECK(with.estimated.data_reduce_payload == Approx(with.reduced).margin(128));
      CHECK(with.estimated.data_gather_payload - without.estimated.data_gather_payload ==
            Approx(with.gathered - without.gathered).epsilon(1e-9));
      for (const RlPhase phase : {RlPhase::train, RlPhase::old_logprobs}) {
        const auto i = static_cast<std::size_t>(phase);
        INFO(name_of(phase) << ' ' << with.estimate.seconds[i] << " for " << with.plan.seconds[i] << ", without "
                            << without.estimate.seconds[i] << " for " << without.plan.seconds[i]);
        const double usual = without.estimate.seconds[i] / without.plan.seconds[i];
        CHECK(std::abs(with.estimate.seconds[i] / with.plan.seconds[i] / usual - 1.0) < 0.15);
      }
    }
}

TEST_CASE("Adapters of what nothing executes: frozen weights as the system keeps them, state of the adapters alone") {
  const std::vector<std::string> lora = {"train.lora={rank: 16, alpha: 32}"};
  const auto trained = [&](const char* profile, const char* engine, const char* precision) {
    return pricer_of_text(
        llama(fmt::format("profile: {}\ntrain: {{engine: {}, layout: {{dp: 4}}, micro_batch_tokens: 8192, precision: "
                          "{}}}\nrollout: {{engine: vllm, layout: {{tp: 1, dp: 4}}}}\n",
                          profile, engine, precision)
                  .c_str()),
        lora);
  };
  // PyTorch's FSDP has all shards in the dtype that the model is made in, here fp32, frozen ones too: 4 B of each over
  // 4 ranks. Of the adapters gradients and two moments besides.
  const auto verl = trained("verl-fsdp", "fsdp2", "{params: bf16, grads: fp32, master: fp32}");
  const TrainPrice fsdp = verl->train().price(verl->point().train);
  CHECK(fsdp.state_bytes == Approx((frozen * 4 + adapters * (4 + 4 + 8)) / 4).epsilon(1e-9));
  CHECK(fsdp.grad_bytes == Approx(adapters * 4 / 4).epsilon(1e-9));
  CHECK(fsdp.source_bytes == Approx((frozen + adapters) * 4 / 4).epsilon(1e-9));
  // Megatron-Bridge's base is what its modules compute in, whole; master and moments of adapters lie over the ranks.
  const auto bridge = trained("verl-megatron", "megatron", "{params: bf16, grads: fp32, master: fp32}");
  const TrainPrice megatron = bridge->train().price(bridge->point().train);
  CHECK(megatron.state_bytes == Approx((frozen + adapters) * 2 + adapters * 4 + adapters * (4 + 8) / 4).epsilon(2e-3));
  // verl asks the actor without its adapters for the reference's log-probs; OpenRLHF loads a reference of its own.
  CHECK(verl->rl().parts(verl->point()).train.swapped_reference == 0);
  const auto open = trained("openrlhf", "zero2", "{params: bf16, grads: bf16, master: fp32}");
  CHECK(open->rl().parts(open->point()).train.swapped_reference == Approx(frozen * 2).epsilon(0.02));
}
