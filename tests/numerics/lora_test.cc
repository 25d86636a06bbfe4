// P3 of adapters: what one rank trains agrees with PEFT, and every layout with both.
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

#include "rl/adapter.h"
#include "spec/stored_parameter.h"
#include "tests/numerics/drawn_layout.h"
#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

void check_adapters(const Golden& g, const TrainingResult& r) {
  check_steps(g, r);
  std::set<std::string> tensors;  // B of q, k and v may be one
  for (const ParamSpec& p : adapters_of(g.model)) tensors.insert(stored_trained(g.model, p).tensor);
  CHECK(r.after5.size() == tensors.size());
  for (const auto& [name, value] : r.after5) {
    CAPTURE(name);
    CHECK(update_error(value, g.tensor("after5." + name), g.initial(name)) <= update_bound);
  }
}

/// A parameter of a tensor as files have it.
std::vector<float> part_of_tensor(const Golden& g, const ParamSpec& p, const std::vector<float>& tensor) {
  const StoredParameter at = stored(g.model, p);
  std::vector<float> out(static_cast<std::size_t>(p.numel()));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = tensor[static_cast<std::size_t>(at.element(static_cast<std::int64_t>(i)))];
  return out;
}

Scenario lora_scenario(const Golden& g, TrainEngine engine, const TrainLayout& layout) {
  Scenario s = golden_scenario(g, layout.ranks());
  s.train.engine = engine, s.train.layout = layout;
  s.train.micro_batch_tokens = layout.share_of(g.num_tokens());
  if (g.model.moe && !g.model.adapts_experts()) s.train.layout.etp = layout.tp;
  if (layout.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
  return s;
}

/// Two steps in one layout and the others in another: as all in one, and what is exported then is PEFT's merge.
void check_goes_on(const Golden& g, const Scenario& first, Scenario then) {
  then.steps = static_cast<std::int64_t>(g.losses.size());
  const TrainingResult r = train_on(g, first, then, 2);
  REQUIRE(r.losses.size() + 2 == g.losses.size());
  for (std::size_t at = 0; at < r.losses.size(); ++at)
    CHECK(r.losses[at] == Approx(g.losses[at + 2]).epsilon(scalar_bound));
  for (const auto& [name, value] : r.after5) {
    CAPTURE(name);
    CHECK(update_error(value, g.tensor("after5." + name), g.initial(name)) <= update_bound);
  }
  const Checkpoint base = Checkpoint::open(g.model.weights_path).value();
  for (const ParamSpec& p : parameters_of(g.model)) {
    CAPTURE(p.name);
    const std::vector<float> before = base.load_parameter(g.model, p).value();
    if (!g.model.adapts(p.role)) CHECK(r.merged.at(p.name) == before);
    else
      CHECK(update_error(r.merged.at(p.name), part_of_tensor(g, p, g.tensor("merged." + stored(g.model, p).tensor)),
                         before) <= update_bound);
  }
}

}  // namespace

TEST_CASE("adapters: logits, gradients and five AdamW steps agree with PEFT") {
  for (const std::string& name : golden_adapters()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    const TrainingResult r = train(g, golden_scenario(g, 1));
    CHECK(r.losses.at(0) == Approx(g.loss).epsilon(1e-6));
    CHECK(relative_error(r.probes.at("logits"), g.tensor("logits")) <= logit_bound);
    CHECK(relative_error(r.probes.at("logps"), g.tensor("logprobs")) <= logit_bound);
    for (const ParamSpec& p : adapters_of(g.model)) {
      const std::string tensor = "grad." + stored_trained(g.model, p).tensor;
      CAPTURE(tensor);
      CHECK(relative_error(r.probes.at(tensor), g.tensor(tensor)) <= gradient_bound);
    }
    check_adapters(g, r);
  }
}

TEST_CASE("adapters: recomputation, chunks, micro-batches and bodies that are not shared compute the same") {
  for (const std::string& name : golden_adapters()) {
    const Golden g = Golden::load(name);
    for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
      CAPTURE(name, static_cast<int>(recompute));
      Scenario s = golden_scenario(g, 1);
      s.train.recompute = recompute, s.train.loss_chunk_tokens = 7;
      if (recompute == Recompute::full) s.train.micro_batch_tokens = g.longest_sequence();
      check_adapters(g, train(g, s));
    }
  }
}

TEST_CASE("adapters: every kind of layout computes what PEFT does") {
  struct Way {
    const char* model;
    TrainEngine engine;
    TrainLayout layout;
    const char* schedule = "1f1b";
    std::int64_t few = 0;  // ranks that keep a unit among them
    double capacity = 0.0;
    ExpertDispatch dispatch = ExpertDispatch::per_expert;
  };
  const auto fsdp1 = TrainEngine::fsdp1, fsdp2 = TrainEngine::fsdp2;
  for (const Way& way :
       {Way{"lora-llama-gqa", fsdp2, {.dp = 4}},
        {"lora-llama-gqa", fsdp2, {.dp = 4, .fsdp = 2}},
        {"lora-qwen2-bias", TrainEngine::ddp, {.dp = 3}},
        {"lora-qwen3-norm", TrainEngine::zero1, {.dp = 2}},
        {"lora-qwen3-norm", TrainEngine::zero2, {.dp = 4, .fsdp = 2}},
        {"lora-llama-gqa", fsdp2, {.dp = 1, .tp = 2}},
        {"lora-llama-gqa", fsdp2, {.dp = 2, .tp = 2, .sp = true}},
        {"lora-mha-one-kv", fsdp2, {.dp = 1, .tp = 4}},
        {"lora-mha-one-kv", TrainEngine::zero1, {.dp = 2, .tp = 2, .sp = true}},
        {"lora-qwen2-bias", TrainEngine::ddp, {.dp = 1, .tp = 4, .sp = true}},
        {"lora-gemma2-tiny", fsdp2, {.dp = 2, .tp = 2}},
        {"lora-llama-gqa", fsdp2, {.dp = 2, .pp = 2}},
        {"lora-qwen2-bias", TrainEngine::zero1, {.dp = 1, .tp = 2, .pp = 2}, "zero-bubble"},
        {"lora-qwen2-bias", fsdp2, {.dp = 2, .pp = 2}, "zero-bubble"},
        {"lora-qwen2-bias", fsdp2, {.dp = 4}, "1f1b", 2},
        {"lora-llama-gqa", fsdp2, {.dp = 1, .cp = 2}},
        {"lora-qwen3-norm", fsdp2, {.dp = 2, .ulysses = 2}},
        {"lora-deepseek-v3-tiny", fsdp2, {.dp = 2, .tp = 2, .sp = true}},
        {"lora-deepseek-v3-tiny", TrainEngine::zero1, {.dp = 1, .tp = 4}},
        {"lora-deepseek-v3-tiny", fsdp2, {.dp = 2, .pp = 2}},
        {"lora-deepseek-v3-tiny", fsdp2, {.dp = 1, .cp = 2}},
        {"lora-deepseek-v2-tiny", fsdp1, {.dp = 2, .ulysses = 2}},
        {"lora-deepseek-v2-tiny", TrainEngine::ddp, {.dp = 1, .tp = 2, .pp = 2}, "zero-bubble"},
        {"lora-gpt2-tiny", fsdp2, {.dp = 2, .tp = 2, .sp = true}},
        {"lora-gpt2-tiny", TrainEngine::zero2, {.dp = 2, .pp = 2}},
        {"lora-gpt2-tiny", fsdp1, {.dp = 1, .cp = 2}},
        {"lora-llama-gqa", fsdp1, {.dp = 3}},
        {"lora-llama-gqa", fsdp1, {.dp = 2, .tp = 2, .sp = true}},
        {"lora-qwen2-bias", fsdp1, {.dp = 2, .pp = 2}},
        {"lora-mixtral-tiny", fsdp1, {.dp = 4, .fsdp = 2}},
        {"lora-mixtral-tiny", fsdp2, {.dp = 2, .tp = 2}},
        {"lora-mixtral-tiny", fsdp2, {.dp = 4, .ep = 2}},
        {"lora-qwen3-moe-tiny", fsdp2, {.dp = 4, .ep = 2}},
        {"lora-qwen3-moe-tiny", TrainEngine::zero1, {.dp = 2, .tp = 2, .ep = 4, .sp = true}},
        {"lora-qwen3-moe-tiny", fsdp2, {.dp = 2, .tp = 2, .ep = 2}},
        {"lora-qwen3-moe-tiny", fsdp2, {.dp = 2, .ep = 2}, "1f1b", 0, 0.4},
        {"lora-mixtral-tiny-experts", fsdp1, {.dp = 3}},
        {"lora-mixtral-tiny-experts", TrainEngine::ddp, {.dp = 1, .tp = 2, .sp = true}},
        {"lora-mixtral-tiny-experts", fsdp2, {.dp = 2, .ep = 2}, "1f1b", 0, 0.0, ExpertDispatch::per_rank},
        {"lora-deepseek-v3-tiny-experts", fsdp2, {.dp = 2, .tp = 2, .ep = 2}},
        {"lora-deepseek-v3-tiny-experts", TrainEngine::zero2, {.dp = 2, .pp = 2, .ep = 2}, "zero-bubble", 0, 0.4},
        // Ranks share each expert's columns, and have one of its adapters' two matrices whole: of a tensor-parallel
        // group, in pairs of it, and among the data ranks.
        {"lora-mixtral-tiny-experts", fsdp2, {.dp = 2, .tp = 2, .etp = 2}},
        {"lora-mixtral-tiny-experts", TrainEngine::ddp, {.dp = 2, .tp = 2, .etp = 2, .sp = true}},
        {"lora-mixtral-tiny-experts", TrainEngine::zero1, {.dp = 1, .tp = 4, .ep = 2, .etp = 2}},
        {"lora-qwen3-moe-tiny", fsdp2, {.dp = 4, .ep = 2, .etp = 2}},
        {"lora-qwen3-moe-tiny", TrainEngine::ddp, {.dp = 2, .etp = 2}},
        {"lora-qwen3-moe-tiny", fsdp1, {.dp = 2, .tp = 2, .etp = 4, .sp = true}},
        {"lora-deepseek-v3-tiny-experts", TrainEngine::zero2, {.dp = 2, .tp = 2, .ep = 2, .etp = 2}},
        {"lora-glm4-moe-tiny", fsdp2, {.dp = 4, .fsdp = 2, .etp = 2}, "1f1b", 0, 0.4},
        {"lora-qwen3-moe-tiny", fsdp1, {.dp = 4, .ep = 2}},
        {"lora-qwen3-moe-tiny", fsdp1, {.dp = 4, .fsdp = 2, .ep = 2}},
        {"lora-mixtral-tiny-experts", fsdp1, {.dp = 2, .tp = 2, .ep = 4, .sp = true}},
        {"lora-mixtral-tiny-experts", fsdp1, {.dp = 2, .pp = 2, .ep = 2}},
        {"lora-glm4-moe-tiny", fsdp2, {.dp = 2, .tp = 2, .ep = 2}},
        {"lora-glm4-moe-tiny", TrainEngine::zero1, {.dp = 1, .tp = 2, .ep = 2, .sp = true}},
        {"lora-glm4-moe-tiny", fsdp2, {.dp = 2, .pp = 2, .ep = 2}, "1f1b", 0, 0.4}}) {
    CAPTURE(way.model, static_cast<int>(way.engine), way.layout.dp, way.layout.fsdp, way.layout.tp, way.layout.sp,
            way.layout.pp, way.layout.cp, way.layout.ulysses, way.schedule);
    const Golden g = Golden::load(way.model);
    Scenario s = lora_scenario(g, way.engine, way.layout);
    s.train.pipeline_schedule = way.schedule, s.train.reshard_ranks = way.few;
    s.train.expert_capacity = way.capacity, s.train.expert_dispatch = way.dispatch;
    check_adapters(g, train(g, s));
  }
}

TEST_CASE("adapters: layouts drawn at random compute what PEFT does") {
  for_drawn_layouts(golden_adapters(), 24, 9'000'011,
                    [](const Golden& g, const Scenario& s) { check_adapters(g, train(g, s)); });
}

TEST_CASE("adapters: a checkpoint of one layout goes on in another, and the model with them in it is PEFT's") {
  for_drawn_pairs(golden_adapters(), 8, 11'000'003, check_goes_on);
}

TEST_CASE("adapters: where ranks have other experts each matrix gets its own expert's") {
  const Golden g = Golden::load("lora-qwen3-moe-tiny");
  check_goes_on(g, lora_scenario(g, TrainEngine::fsdp2, {.dp = 2, .tp = 2, .etp = 4}),
                lora_scenario(g, TrainEngine::zero1, {.dp = 4, .ep = 2, .etp = 2}));
  check_goes_on(g, lora_scenario(g, TrainEngine::fsdp2, {.dp = 4, .ep = 2}),
                lora_scenario(g, TrainEngine::zero1, {.dp = 2, .tp = 2, .ep = 4, .sp = true}));
}
