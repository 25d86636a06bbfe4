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

TEST_CASE("an engine's host takes time for every running sequence, a layer for every further node, whoever trains") {
  const auto s = pricer_of_text(eight_b), ours = pricer_of_text(eight_b, {"rollout.engine=sglang"});
  const RlModel &rl = s->rl(), &plain = ours->rl();
  const RolloutPoint r = rollout_point_of(s->scenario());
  // 64 sequences at 0.0953 ms; inside one node nothing else.
  CHECK(rl.decode_round(r, 64, 500).seconds() - plain.decode_round(r, 64, 500).seconds() == Approx(64 * 9.53e-5));
  const auto verl = pricer_of_text(eight_b, {"profile=verl-megatron"});
  CHECK(verl->rl().decode_round(r, 64, 500).gap == rl.decode_round(r, 64, 500).gap);
  // tp 16 on nodes of 8: one further node, 32 layers at 0.172 ms.
  RolloutPoint wide = r;
  wide.tp = 16, wide.engines = 2;
  CHECK(rl.decode_round(wide, 64, 500).gap == Approx(64 * 9.53e-5 + 32 * 1.72e-4));
  // What explain books is what the price takes, and the framework's own time is a phase.
  const Explanation e = explain(*s);
  CHECK(e.price.seconds[static_cast<std::size_t>(RlPhase::framework)] == Approx(5.84));
  double sum = 0.0;
  for (const CostNode& n : e.time.children) sum += n.seconds;
  CHECK(sum == Approx(e.price.iteration_seconds));
}

TEST_CASE("without captured graphs a decode step waits for the host's launches") {
  const auto graphs = pricer_of_text(eight_b), eager = pricer_of_text(eight_b, {"rollout.eager=true"});
  const RolloutPoint r = rollout_point_of(graphs->scenario());
  const double replayed = graphs->rl().decode_round(r, 8, 500).seconds(),
               launched = eager->rl().decode_round(r, 8, 500).seconds();
  // 32 layers at 0.8 ms of host each are 25 ms, where the device takes a few.
  CHECK(launched > 0.020);
  CHECK(launched < 0.035);
  CHECK(replayed < 0.5 * launched);
}

TEST_CASE("host memory of slime's 30B on a node: what its actors were seen to hold") {
  const char* thirty =
      "model: qwen3-30b-a3b\ncluster: {gpu: h100-sxm-80gb, host_memory_gib: 2048}\nprofile: slime-megatron\n"
      "train: {engine: megatron, layout: {dp: 2, tp: 4, ep: 8, sp: true}, micro_batch_tokens: 20480, recompute: full}\n"
      "optimizer: {cpu_fraction: 1}\nrollout: {engine: sglang, layout: {tp: 8, dp: 1}, memory_fraction: 0.7}\n"
      "algorithm: {prompts: 32, samples_per_prompt: 8, reference: true}\n"
      "workload: {prompt_tokens: {mean: 512, max: 2048}, response_tokens: {mean: 2730, max: 8192}}\n";
  const auto s = pricer_of_text(thirty);
  // slime issue 1851: 8 actors of about 102 GB each, 816 of a node.
  CHECK(s->price(s->point()).host_bytes == Approx(102e9).epsilon(0.05));
  const Explanation e = explain(*s);
  double parts = 0.0;
  for (const CostNode& n : e.host.children) parts += n.bytes;
  CHECK(parts == Approx(e.price.host_bytes));
}

}  // namespace
}  // namespace hotbunk
