// Published RL iterations, and the terms that they are fitted with.
#include <catch2/catch.hpp>

#include "planner/rl/rl_model.h"
#include "tests/planner/own_tables.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

const char* const eight_b =
    "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\nprofile: nemo-megatron\n"
    "train: {engine: megatron, layout: {dp: 16, pp: 2}, micro_batch_tokens: 4096, recompute: full}\n"
    "rollout: {engine: vllm, layout: {tp: 8, dp: 4}, memory_fraction: 0.6}\n"
    "algorithm: {prompts: 64, samples_per_prompt: 32, mini_batches: 4, reference: true}\n"
    "workload: {prompt_tokens: {mean: 150, max: 150, distribution: fixed}, response_tokens: {mean: 900, max: 3946}}\n";

TEST_CASE("published RL iterations are predicted within the stated error") {
  const auto v = validate_published(published, catalog_root());
  REQUIRE(v.has_value());
  const auto at =
      std::find_if(v->tables.begin(), v->tables.end(), [](const auto& t) { return t.name == "rl_iterations"; });
  REQUIRE(at != v->tables.end());
  CHECK(at->rows.size() == 22);
  CHECK(at->skipped.size() == 1);  // DAPO: dynamic sampling
  CHECK(at->mean_abs_error() < 0.20);
  CHECK(std::abs(at->bias()) < 0.08);
}

TEST_CASE("an engine's host takes time for every running sequence, and a layer for every further node") {
  const auto s = pricer_of_text(eight_b), ours = pricer_of_text(eight_b, {"profile=megatron"});
  const RlModel &rl = s->rl(), &plain = ours->rl();
  const RolloutPoint r = rollout_point_of(s->scenario());
  // 64 sequences at 0.102 ms; inside one node nothing else.
  CHECK(rl.decode_round(r, 64, 500).seconds() - plain.decode_round(r, 64, 500).seconds() == Approx(64 * 1.02e-4));
  // tp 16 on nodes of 8: one further node, 32 layers at 0.171 ms.
  RolloutPoint wide = r;
  wide.tp = 16, wide.engines = 2;
  CHECK(rl.decode_round(wide, 64, 500).gap == Approx(64 * 1.02e-4 + 32 * 1.71e-4));
  // What explain books is what the price takes, and the framework's own time is a phase.
  const Explanation e = explain(*s);
  CHECK(e.price.seconds[static_cast<std::size_t>(RlPhase::framework)] == Approx(7.9));
  double sum = 0.0;
  for (const CostNode& n : e.time.children) sum += n.seconds;
  CHECK(sum == Approx(e.price.iteration_seconds));
}

}  // namespace
}  // namespace hotbunk
