// P3 where the experts' mesh lies otherwise over the ranks than the dense one: columns of some experts on each rank,
// several blocks with the same experts in a tensor-parallel group, and both beside data ranks. Random layouts draw such
// ones too (drawn_layout.cc).
#include "spec/expert_mesh.h"

#include <catch2/catch.hpp>

#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("any mesh of experts beside the dense one computes the same, as the plan says it") {
  struct Way {
    const char* model;
    ExpertMesh mesh;
    TrainLayout layout;
    TrainEngine engine = TrainEngine::fsdp2;
    Recompute recompute = Recompute::selective;
    double capacity = 0.0;
    std::int64_t few = 0;  // ranks with the same experts that keep a unit among them
  };
  for (const Way& way : {
           // Pairs of ranks share each expert, the two pairs have other ones; and with data ranks that have others yet.
           Way{"mixtral-tiny", {1, 4, 2, 1}, {.tp = 4, .ep = 2, .etp = 2}},
           {"gpt-oss-tiny", {1, 4, 2, 2}, {.dp = 2, .tp = 4, .ep = 4, .etp = 2, .sp = true}, TrainEngine::zero1},
           // Each rank has all experts, and its own tokens; so, and data ranks have other ones each.
           {"mixtral-tiny", {2, 1, 1, 1}, {.tp = 2, .sp = true}, TrainEngine::fsdp2, Recompute::full},
           {"qwen3-moe-tiny", {2, 1, 1, 1}, {.dp = 2, .tp = 2, .sp = true}, TrainEngine::ddp, Recompute::none},
           {"deepseek-v2-tiny", {2, 1, 1, 3}, {.dp = 3, .tp = 2, .ep = 3, .sp = true}},
           // Blocks of two: pairs that share every expert, or have half of them each, beside shared experts and losses
           // of routers; with other pairs on data ranks, in rounds.
           {"gpt-oss-tiny", {2, 2, 1, 1}, {.tp = 4, .etp = 2, .sp = true}, TrainEngine::zero2, Recompute::full},
           {"deepseek-v3-tiny", {2, 2, 2, 1}, {.tp = 4, .pp = 2, .ep = 2, .sp = true}, TrainEngine::zero1},
           {"aux-qwen3-moe-tiny", {2, 2, 2, 1}, {.dp = 2, .tp = 4, .ep = 2, .sp = true}},
           {"aux-deepseek-v3-tiny", {2, 1, 1, 1}, {.tp = 2, .sp = true}, TrainEngine::ddp},
           // Flat parameters of experts by themselves, cut over blocks with the same ones.
           {"mixtral-tiny", {2, 1, 1, 1}, {.dp = 2, .tp = 2, .sp = true}, TrainEngine::fsdp1},
           {"deepseek-v2-tiny", {2, 2, 2, 3}, {.dp = 3, .tp = 4, .ep = 6, .sp = true}, TrainEngine::fsdp1},
           {"gpt-oss-tiny",
            {1, 4, 2, 2},
            {.dp = 4, .fsdp = 2, .tp = 4, .ep = 4, .etp = 2, .sp = true},
            TrainEngine::fsdp1,
            Recompute::full},
           {"deepseek-v2-tiny",
            {2, 2, 2, 3},
            {.dp = 3, .tp = 4, .ep = 6, .sp = true},
            TrainEngine::ddp,
            Recompute::none,
            0.4},
           // Units kept among every second rank, of whole experts and of columns that pairs of data ranks share.
           {"mixtral-tiny", {1, 1, 1, 2}, {.dp = 4, .ep = 2}, TrainEngine::fsdp2, Recompute::none, 0.0, 2},
           {"qwen3-moe-tiny",
            {1, 2, 1, 2, 2},
            {.dp = 4, .tp = 2, .etp = 4, .sp = true},
            TrainEngine::fsdp2,
            Recompute::full,
            0.0,
            2},
           // Data ranks share each expert: pairs, of which others have others; beside blocks that have a part of each,
           // with biases, and rows in rounds; and neighbours in one block that have other parts.
           {"mixtral-tiny", {1, 1, 1, 4, 2}, {.dp = 4, .ep = 2, .etp = 2}},
           {"qwen3-moe-tiny", {1, 1, 1, 2, 2}, {.dp = 2, .etp = 2}, TrainEngine::ddp, Recompute::none},
           {"gpt-oss-tiny", {1, 2, 1, 2, 2}, {.dp = 2, .tp = 2, .etp = 4}, TrainEngine::zero1, Recompute::full},
           {"aux-deepseek-v3-tiny", {1, 2, 1, 2, 2}, {.dp = 2, .tp = 2, .etp = 4, .sp = true}, TrainEngine::zero2},
           {"deepseek-v2-tiny",
            {1, 4, 2, 3, 3},
            {.dp = 3, .tp = 4, .ep = 2, .etp = 6, .sp = true},
            TrainEngine::fsdp2,
            Recompute::selective,
            0.4},
       }) {
    const TrainLayout& l = way.layout;
    CAPTURE(way.model, l.dp, l.tp, l.pp, l.ep, l.etp, static_cast<int>(way.engine));
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, l.ranks());
    s.train.engine = way.engine, s.train.layout = l, s.train.recompute = way.recompute;
    s.train.expert_capacity = way.capacity, s.train.reshard_ranks = way.few;
    s.train.micro_batch_tokens = l.share_of(g.longest_sequence());
    if (l.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
    CHECK(expert_mesh(s) == way.mesh);
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    check_training(g, r);
    CHECK(r.unlike_plan == "");
  }
}
