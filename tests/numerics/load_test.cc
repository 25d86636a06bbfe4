// train.load: rank0: one rank reads the files, and all have what they would have read themselves.
#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "graph/boxes.h"
#include "lowering/lower.h"
#include "rl/weights.h"
#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// The rectangles of files that a rank reads.
std::size_t boxes_read(const Plan& plan, Rank rank) {
  std::size_t boxes = 0;
  const Places places = places_of(plan, rank);
  for (const Body& body : plan.program(rank).bodies)
    for (const Op& op : body.ops)
      if (op.kind == OpKind::feed && !op.moves.empty()) boxes += boxes_of(op, places).size();
  return boxes;
}

struct Loaded {
  std::string model;
  std::int64_t ranks;
  std::function<void(Scenario&)> set;
};

const std::vector<Loaded>& loaded_ways() {
  static const std::vector<Loaded> all = {
      {"llama-gqa", 4, [](Scenario& s) { s.train.layout.tp = 2, s.train.layout.dp = 2; }},
      {"llama-gqa", 2, [](Scenario& s) { s.train.engine = TrainEngine::fsdp1; }},
      {"llama-tied", 4,
       [](Scenario& s) {
         s.train.engine = TrainEngine::zero1;
         s.train.layout.pp = 2, s.train.layout.dp = 2, s.train.pipeline_split = {1, s.model.layers - 1};
       }},
      {"mixtral-tiny", 4,
       [](Scenario& s) {
         s.train.layout.tp = 2, s.train.layout.dp = 2, s.train.layout.ep = 2, s.train.layout.etp = 2;
       }},
      {"qwen3-norm", 2, [](Scenario& s) { s.train.engine = TrainEngine::zero2, s.optimizer.cpu_fraction = 0.4; }},
  };
  return all;
}

}  // namespace

TEST_CASE("a model that the first rank reads and broadcasts trains as one of which each rank reads its part") {
  for (const Loaded& way : loaded_ways()) {
    CAPTURE(way.model, way.ranks);
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, way.ranks);
    way.set(s);
    s.train.micro_batch_tokens = (g.num_tokens() + 1) / 2 * 2;
    const TrainingResult apart = train(g, s);
    s.train.load = "rank0";
    const auto plan = lower(s);
    REQUIRE(plan);
    CHECK(boxes_read(*plan, 0) > 0);
    for (Rank r = 1; r < way.ranks; ++r) CHECK(boxes_read(*plan, r) == 0);
    const TrainingResult said = train(g, s);
    CHECK(said.losses == apart.losses);
    CHECK(said.grad_norms == apart.grad_norms);
    CHECK(said.after5 == apart.after5);
  }
}

TEST_CASE("a rank that is asked for nothing of the files opens none") {
  Scenario s = golden_scenario(Golden::load("llama-gqa"), 2);
  s.model.weights_path = "/not/there";
  CHECK(!LoadSources::open(s, {}, true));
  CHECK(LoadSources::open(s, {}, false));
}

TEST_CASE("a checkpoint's moments, too, come from the first rank") {
  const Golden g = Golden::load("llama-gqa");
  Scenario first = golden_scenario(g, 2), then = first;
  const TrainingResult apart = train_on(g, first, then, 2);
  then.train.load = "rank0";
  const TrainingResult said = train_on(g, first, then, 2);
  CHECK(said.losses == apart.losses);
  CHECK(said.after5 == apart.after5);
}
