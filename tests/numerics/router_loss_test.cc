// P3 where routers add to the loss: what one rank makes of it agrees with transformers' load_balancing_loss_func of
// each layer and sequence (of sigmoids with DeepSeek-V3's formula), and every layout with it. Random layouts draw these
// models too (training_test.cc).
#include <catch2/catch.hpp>

#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("routers' losses: gradients and five AdamW steps agree with transformers, however micro-batches are cut") {
  for (const std::string& name : golden_router_losses())
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      CAPTURE(name, static_cast<int>(recompute));
      const Golden g = Golden::load(name);
      Scenario s = golden_scenario(g, 1);
      s.train.recompute = recompute;
      if (recompute == Recompute::full) s.train.micro_batch_tokens = g.longest_sequence();
      const TrainingResult r = train(g, s, Against::reference_and_plan);
      check_training(g, r);
      CHECK(r.unlike_plan == "");
    }
}

TEST_CASE("routers' losses: every way to cut tokens, layers and experts computes the same") {
  struct Way {
    const char* model;
    TrainEngine engine;
    TrainLayout layout;
    const char* schedule = "1f1b";
  };
  const auto fsdp2 = TrainEngine::fsdp2;
  for (const Way& way :
       {Way{"aux-mixtral-tiny", fsdp2, {.dp = 1, .tp = 2, .etp = 2, .sp = true}},
        {"aux-qwen3-moe-tiny", TrainEngine::zero1, {.dp = 1, .tp = 2, .ep = 2}},
        {"aux-qwen3-moe-tiny", fsdp2, {.dp = 1, .cp = 2}},
        {"aux-mixtral-tiny", fsdp2, {.dp = 1, .cp = 2, .ulysses = 2}},
        {"aux-deepseek-v3-tiny", TrainEngine::ddp, {.dp = 2, .ep = 2}},
        {"aux-deepseek-v3-tiny", fsdp2, {.dp = 1, .ulysses = 2, .pp = 2}},
        {"aux-mixtral-tiny", TrainEngine::zero1, {.dp = 1, .tp = 2, .pp = 2, .etp = 2}, "zero-bubble"}}) {
    CAPTURE(way.model, way.layout.dp, way.layout.cp, way.layout.ulysses, way.layout.tp, way.layout.pp, way.layout.ep);
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, way.layout.ranks());
    s.train.engine = way.engine, s.train.layout = way.layout, s.train.pipeline_schedule = way.schedule;
    s.train.micro_batch_tokens = way.layout.share_of(g.longest_sequence());
    if (way.layout.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    check_training(g, r);
    CHECK(r.unlike_plan == "");
  }
}
