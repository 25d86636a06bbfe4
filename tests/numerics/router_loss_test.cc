// P3 where routers add to the loss: what one rank makes of it agrees with transformers' load_balancing_loss_func of
// each layer and sequence (of sigmoids with DeepSeek-V3's formula), and every layout with it. Random layouts draw these
// models too (training_test.cc).
#include <catch2/catch.hpp>

#include "base/rounding.h"
#include "spec/stored_parameter.h"
#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

// P3's bounds (training_test.cc).
constexpr double router_gradient_bound = 1e-4, router_update_bound = 1e-3, router_scalar_bound = 2e-5,
                 router_loss_bound = 1e-5;

void check_router_losses(const Golden& g, const TrainingResult& r) {
  REQUIRE(r.losses.size() == g.losses.size() + 1);
  for (std::size_t i = 0; i < g.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(r.losses[i] == Approx(g.losses[i]).epsilon(i == 0 ? router_loss_bound : router_scalar_bound));
    CHECK(r.grad_norms[i] == Approx(g.grad_norms[i]).epsilon(router_scalar_bound));
  }
  CHECK(r.losses.back() == Approx(g.final_loss).epsilon(router_scalar_bound));
  for (const ParamSpec& p : parameters_of(g.model)) {
    if (p.role == ParamRole::router_bias) continue;  // no gradient reaches it
    const std::string name = stored(g.model, p).tensor;
    CAPTURE(name);
    CHECK(relative_error(r.probes.at("grad." + name), g.tensor("grad." + name)) <= router_gradient_bound);
    CHECK(update_error(r.after5.at(name), g.tensor("after5." + name), g.initial(name)) <= router_update_bound);
  }
}

}  // namespace

TEST_CASE("routers' losses: gradients and five AdamW steps agree with transformers, however micro-batches are cut") {
  for (const std::string& name : golden_router_losses())
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      CAPTURE(name, static_cast<int>(recompute));
      const Golden g = Golden::load(name);
      Scenario s = golden_scenario(g, 1);
      s.train.recompute = recompute;
      if (recompute == Recompute::full) s.train.micro_batch_tokens = g.longest_sequence();
      const TrainingResult r = train(g, s, Against::reference_and_plan);
      check_router_losses(g, r);
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
    check_router_losses(g, r);
    CHECK(r.unlike_plan == "");
  }
}
