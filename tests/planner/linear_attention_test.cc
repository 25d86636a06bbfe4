// Prices of models with linear attention in some layers, each expectation derived in a comment.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "tests/planner/pricers.h"

using namespace hotbunk;

namespace {

std::unique_ptr<ScenarioPricer> hybrid(const char* model, std::int64_t tp, const std::vector<std::string>& sets = {}) {
  return pricer_of_text(
      fmt::format("model: {}\nprofile: verl-megatron\ncluster: {{gpu: h800-sxm-80gb}}\n"
                  "train: {{engine: megatron, layout: {{dp: {}, tp: {}, sp: {}}}, recompute: none}}\n"
                  "rollout: {{engine: sglang, layout: {{tp: {}, dp: {}}}, memory_fraction: 0.35}}\n"
                  "algorithm: {{prompts: 32, samples_per_prompt: 5, reference: true}}\n"
                  "workload: {{prompt_tokens: {{mean: 512, max: 1024}}, response_tokens: {{mean: 1024, "
                  "max: 2048}}}}\n",
                  model, 8 / tp, tp, tp > 1, tp, 8 / tp),
      sets);
}

}  // namespace

TEST_CASE("Linear attention: parameters and states are those of both kinds of layers") {
  for (const std::int64_t tp : {1, 2}) {
    const auto p = hybrid("qwen3.5-9b", tp);
    const TrainPoint point = p->point().train;
    const TrainModel::Layers l = p->train().layers(point);
    // 32 mean layers, embedding and head are the model, but for what tensor parallelism cuts and what it does not:
    // norms.
    const double whole = static_cast<double>(parameter_count(p->scenario().model));
    CHECK(static_cast<double>(tp) * (32 * l.dense.parameters + l.embedding.parameters + l.head.parameters) ==
          Approx(whole).epsilon(1e-4));
    // A token's keys and values are in 8 of 32 layers: 2 x 4 heads x 256 x 2 B, over tp.
    CHECK(p->rl().price_rollout(p->point().rollout).kv_bytes_per_token ==
          Approx(8.0 * 2 * 4 * 256 * 2 / static_cast<double>(tp)));
  }
}

TEST_CASE("Linear attention: what a layer multiplies, and what a sequence leaves behind") {
  const auto p = hybrid("qwen3.5-9b", 1), all = hybrid("{base: qwen3.5-9b, full_attention_interval: 1}", 1);
  TrainPoint point = p->point().train;
  const double T = static_cast<double>(point.micro_batch * p->train().setting().sequence);
  // Of the recurrence 5 numbers' worth of a state of 128 x 128 for each of 32 heads and token, in 24 of 32 layers; of
  // products 2 for each weight but norms, convolution, offsets.
  const TrainModel::Layers l = p->train().layers(point), f = all->train().layers(point);
  const double linear = 8192.0 * 4096 + 2 * 4096.0 * 4096 + 2 * 32 * 4096,
               full = 8192.0 * 4096 + 2 * 1024 * 4096.0 + 4096.0 * 4096;
  const double keys = p->train().setting().mean_keys;
  const double attention = 2.0 * keys * 16 * 512;
  CHECK(l.dense.flops_forward / T ==
        Approx(0.75 * (2 * linear + 5.0 * 128 * 128 * 32) + 0.25 * (2 * full + attention) + 2 * 3 * 12288.0 * 4096)
            .epsilon(1e-9));
  CHECK(f.dense.flops_forward / T == Approx(2 * full + attention + 2 * 3 * 12288.0 * 4096).epsilon(1e-9));
  // States of 32 x 128 x 128 x 4 B and 3 tokens of 8192 x 2 B in 24 layers are as many bytes as 1,572 tokens of the
  // cache.
  const double states = 24 * (32.0 * 128 * 128 * 4 + 3 * 8192.0 * 2) / (8 * 2 * 4 * 256 * 2.0);
  CHECK(states == Approx(1572.0));
  // So fewer sequences run at a time than tokens alone would let: of 20,000 in the pool each takes that many more.
  const auto each = [](const char* model) {
    const auto q = hybrid(model, 1, {"rollout.kv_cache_tokens=20000"});
    return 20000.0 / q->rl().price_rollout(q->point().rollout).slots;
  };
  CHECK(each("qwen3.5-9b") - each("{base: qwen3.5-9b, full_attention_interval: 1}") == Approx(states));
  CHECK(p->price(p->point()).iteration_seconds > 0);
}

TEST_CASE("Linear attention: sequences are cut by nothing that has a price, heads by tensor parallelism") {
  const auto p = hybrid("qwen3.5-9b", 1);
  TrainPoint point = p->point().train;
  point.dp = 4, point.cp = 2;
  CHECK_FALSE(p->train().divides(point));
  CHECK_THAT(p->train().why_invalid(point), Catch::Contains("linear attention"));
}

TEST_CASE("Linear attention: SGLang's host stands in the way of every decode step, vLLM's layouts are not counted") {
  const auto p = hybrid("qwen3.5-9b", 8), all = hybrid("{base: qwen3.5-9b, full_attention_interval: 1}", 8);
  const RolloutPoint r = p->point().rollout;
  // sglang-omni issue 760, steps less their forward: 1.84 ms with 32 sequences.
  CHECK(p->rl().decode_round(r, 32, 1000).gap == Approx(1.84e-3).epsilon(0.02));
  CHECK(p->rl().decode_round(r, 16, 1000).gap == Approx(1.37e-3).epsilon(0.02));
  CHECK(all->rl().decode_round(r, 32, 1000).gap == 0.0);  // hidden behind the step before
  // NeMo-RL's recipe of the 9B: vLLM, shard to shard.
  for (const char* mode : {"bucketed", "direct"}) {
    const auto nemo =
        hybrid("qwen3.5-9b", 4, {"profile=nemo-megatron", "rollout.engine=vllm", std::string("sync.mode=") + mode});
    CHECK(nemo->price(nemo->point()).iteration_seconds > 0);
  }
}
