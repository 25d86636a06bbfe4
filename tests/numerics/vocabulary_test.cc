// P3 of a vocabulary that is padded to a multiple: whoever has the rows of padding, they change nothing.
#include <catch2/catch.hpp>
#include <string>

#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("padded vocabularies: every layout computes what transformers does, and counts what is planned") {
  struct Way {
    const char* model;
    TrainEngine engine;
    TrainLayout layout;
    std::int64_t multiple;
    std::int64_t chunk = 0;
  };
  const auto fsdp2 = TrainEngine::fsdp2;
  // A rank's rows end behind the vocabulary, or begin there, and of some the vocabulary is a small part.
  for (const Way& way : {Way{"llama-gqa", fsdp2, {}, 64},
                         {"llama-tied", fsdp2, {.dp = 3}, 32, 7},
                         {"llama-gqa", TrainEngine::fsdp1, {.dp = 3}, 64},
                         {"llama-tied", TrainEngine::zero1, {.dp = 1, .tp = 4}, 16},
                         {"gpt2-tiny", fsdp2, {.dp = 2, .tp = 2, .sp = true}, 64},
                         {"gemma2-tiny", TrainEngine::ddp, {.dp = 1, .tp = 2}, 48, 5},
                         {"llama-tied", fsdp2, {.dp = 1, .tp = 2, .pp = 2}, 64}}) {
    CAPTURE(way.model, static_cast<int>(way.engine), way.layout.dp, way.layout.tp, way.layout.pp, way.multiple);
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, way.layout.ranks());
    s.train.engine = way.engine, s.train.layout = way.layout, s.train.loss_chunk_tokens = way.chunk;
    s.train.micro_batch_tokens = way.layout.share_of(g.num_tokens());
    s.model.vocab_multiple = way.multiple;
    REQUIRE(s.model.vocab_rows(way.layout.tp) * way.layout.tp > g.model.vocab);
    if (way.layout.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    check_training(g, r);
    CHECK(r.unlike_plan == "");
  }
}

TEST_CASE("padded vocabularies: a checkpoint goes on with other rows of padding, and with none") {
  const Golden g = Golden::load("llama-tied");
  const auto with = [&](const TrainLayout& layout, std::int64_t multiple) {
    Scenario s = golden_scenario(g, layout.ranks());
    s.train.layout = layout, s.model.vocab_multiple = multiple;
    s.steps = static_cast<std::int64_t>(g.losses.size());
    return s;
  };
  for (const auto& [first, then] : {std::pair{with({.dp = 1, .tp = 2}, 32), with({.dp = 2}, 0)},
                                    {with({.dp = 1, .tp = 2}, 0), with({.dp = 1, .tp = 4}, 16)}}) {
    const TrainingResult r = train_on(g, first, then, 2);
    REQUIRE(r.losses.size() + 2 == g.losses.size());
    for (std::size_t at = 0; at < r.losses.size(); ++at)
      CHECK(r.losses[at] == Approx(g.losses[at + 2]).epsilon(scalar_bound));
    check_after(g, r);
  }
}
