// P3 where some parameters do not train (train.frozen): what one rank makes of the others agrees with torch's
// requires_grad=False, and every layout with it; what is frozen stays to the bit.
#include <catch2/catch.hpp>

#include "rl/adapter.h"
#include "spec/stored_parameter.h"
#include "tests/numerics/drawn_layout.h"
#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("frozen: gradients and five AdamW steps of what trains agree with torch, the rest stays") {
  for (const std::string& name : golden_frozen()) {
    const Golden g = Golden::load(name);
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      CAPTURE(name, static_cast<int>(recompute));
      Scenario s = golden_scenario(g, 1);
      s.train.recompute = recompute;
      if (recompute != Recompute::none) s.train.loss_chunk_tokens = 7;
      if (recompute == Recompute::full) s.train.micro_batch_tokens = g.longest_sequence();
      check_training(g, train(g, s));
    }
  }
}

TEST_CASE("frozen: every kind of layout computes what torch does") {
  struct Way {
    const char* model;
    TrainEngine engine;
    TrainLayout layout;
    const char* schedule = "1f1b";
    Offload offload = Offload::sleep;
  };
  const auto fsdp2 = TrainEngine::fsdp2;
  for (const Way& way : {Way{"frozen-llama-gqa", fsdp2, {.dp = 4}},
                         {"frozen-llama-gqa", fsdp2, {.dp = 4, .fsdp = 2}},
                         {"frozen-llama-gqa", TrainEngine::ddp, {.dp = 3}},
                         {"frozen-qwen3-norm", TrainEngine::zero1, {.dp = 2}},
                         {"frozen-qwen3-norm", TrainEngine::zero2, {.dp = 4, .fsdp = 2}},
                         {"frozen-llama-tied", fsdp2, {.dp = 2, .tp = 2, .sp = true}},
                         {"frozen-llama-tied", TrainEngine::zero1, {.dp = 1, .tp = 4}},
                         {"frozen-llama-tied", fsdp2, {.dp = 2, .pp = 2}},
                         {"frozen-llama-gqa", TrainEngine::zero1, {.dp = 1, .tp = 2, .pp = 2}, "zero-bubble"},
                         {"frozen-llama-gqa", fsdp2, {.dp = 1, .cp = 2}},
                         {"frozen-qwen3-norm", fsdp2, {.dp = 2, .ulysses = 2}},
                         {"frozen-llama-gqa", TrainEngine::fsdp1, {.dp = 3}},
                         {"frozen-llama-gqa", TrainEngine::fsdp1, {.dp = 2, .tp = 2, .sp = true}},
                         {"frozen-llama-tied", TrainEngine::fsdp1, {.dp = 2, .pp = 2}},
                         {"frozen-llama-tied", TrainEngine::fsdp1, {.dp = 4, .fsdp = 2}},
                         // State on the host, and a stage where nothing trains.
                         {"frozen-llama-gqa", fsdp2, {.dp = 2, .pp = 2}, "1f1b", Offload::layerwise},
                         {"frozen-llama-gqa", TrainEngine::fsdp1, {.dp = 2, .pp = 2}, "1f1b", Offload::layerwise},
                         {"frozen-mixtral-tiny", fsdp2, {.dp = 2, .tp = 2}},
                         {"frozen-mixtral-tiny", fsdp2, {.dp = 4, .ep = 2}},
                         {"frozen-mixtral-tiny", TrainEngine::ddp, {.dp = 2, .ep = 2}}}) {
    CAPTURE(way.model, static_cast<int>(way.engine), way.layout.dp, way.layout.fsdp, way.layout.tp, way.layout.sp,
            way.layout.pp, way.layout.cp, way.layout.ulysses, way.schedule);
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, way.layout.ranks());
    s.train.engine = way.engine, s.train.layout = way.layout, s.train.pipeline_schedule = way.schedule,
    s.train.offload = way.offload;
    s.train.micro_batch_tokens = way.layout.share_of(g.num_tokens());
    if (g.model.moe) s.train.layout.etp = way.layout.tp;
    if (way.layout.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
    check_training(g, train(g, s));
  }
}

TEST_CASE("frozen: a last stage of whose root only the tied table trains, which the first stage counts") {
  Golden g = Golden::load("llama-tied");
  g.model.frozen = "model.norm.weight";
  const TrainingResult one = train(g, golden_scenario(g, 1));
  for (const TrainEngine engine : {TrainEngine::fsdp2, TrainEngine::zero1}) {
    Scenario s = golden_scenario(g, 2);
    s.train.engine = engine, s.train.layout.dp = 1, s.train.layout.pp = 2;
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    REQUIRE(r.losses.size() == one.losses.size());
    for (std::size_t i = 0; i < r.losses.size(); ++i) {
      CHECK(r.losses[i] == Approx(one.losses[i]).epsilon(scalar_bound));
      CHECK(r.grad_norms[i] == Approx(one.grad_norms[i]).epsilon(scalar_bound));
    }
    CHECK(r.unlike_plan == "");
  }
}

TEST_CASE("frozen: layouts drawn at random compute what torch does") {
  for_drawn_layouts(golden_frozen(), 16, 13'000'027,
                    [](const Golden& g, const Scenario& s) { check_training(g, train(g, s)); });
}

TEST_CASE("frozen: a checkpoint of one layout goes on in another") {
  for_drawn_pairs(golden_frozen(), 6, 17'000'023, [](const Golden& g, const Scenario& first, Scenario then) {
    then.steps = static_cast<std::int64_t>(g.losses.size());
    const TrainingResult r = train_on(g, first, then, 2);
    REQUIRE(r.losses.size() + 2 == g.losses.size());
    for (std::size_t at = 0; at < r.losses.size(); ++at)
      CHECK(r.losses[at] == Approx(g.losses[at + 2]).epsilon(scalar_bound));
    check_after(g, r);
  });
}
