// explain's parts of prefill, decode and tail: all of the price, booked by the code that prices.
#include "planner/answers/rollout_tree.h"

#include <catch2/catch.hpp>
#include <set>

#include "planner/rl/engine_step.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

std::unique_ptr<ScenarioPricer> tree_pricer(const std::string& model, const std::vector<std::string>& sets) {
  const std::string text =
      "model: " + model +
      "\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\nprofile: verl-fsdp\n"
      "train: {engine: fsdp2, layout: {dp: 32}, micro_batch_tokens: 16384}\n"
      "rollout: {engine: sglang, layout: {tp: 2, dp: 16}, max_running_requests: 8, memory_fraction: 0.8}\n"
      "algorithm: {name: grpo, prompts: 128, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  return pricer_of_text(text, sets);
}

std::vector<CostNode> nodes_of(const ScenarioPricer& p) {
  const RlPoint point = p.point();
  return rollout_nodes(p.rl(), point, p.rl().price_rollout(point));
}

const CostNode* find(const std::vector<CostNode>& nodes, const std::string& name) {
  for (const CostNode& n : nodes) {
    if (n.name == name) return &n;
    if (const CostNode* below = find(n.children, name)) return below;
  }
  return nullptr;
}

/// Children make up their parents to rounding, without an empty one.
void check_sums(const CostNode& n) {
  if (n.children.empty()) return;
  double sum = 0.0;
  for (const CostNode& c : n.children) {
    INFO(n.name << " / " << c.name);
    CHECK(c.seconds > 0.0);
    sum += c.seconds;
    check_sums(c);
  }
  INFO(n.name);
  CHECK(sum == Approx(n.seconds).epsilon(1e-9));
}

void collect(const CostNode& n, std::set<std::string>& names) {
  names.insert(n.name);
  for (const CostNode& c : n.children) collect(c, names);
}

}  // namespace

TEST_CASE("every second of a rollout's steps has a name") {
  struct Case {
    const char* model;
    std::vector<std::string> sets;
  };
  const std::vector<Case> cases = {{"qwen2.5-7b", {}},
                                   {"qwen2.5-7b", {"rollout.layout={tp: 2, pp: 4, dp: 4}"}},
                                   {"qwen2.5-7b", {"rollout.engine=vllm", "rollout.layout={tp: 2, cp: 2, dp: 8}"}},
                                   {"mixtral-8x7b", {"rollout.layout={tp: 4, cp: 2, dp: 4}"}},
                                   {"mixtral-8x7b", {"rollout.layout={tp: 4, ep: 4, attention_dp: 2, dp: 8}"}},
                                   {"deepseek-v3", {"cluster.gpu=h200-sxm-141gb", "rollout.layout={tp: 16, dp: 2}"}},
                                   {"qwen2.5-0.5b", {"rollout.engine=hotbunk", "rollout.layout={tp: 1, dp: 32}"}},
                                   {"qwen2.5-7b",
                                    {"train.offload=none", "rollout.memory_fraction=0.35",
                                     "rollout.max_running_requests=1024", "algorithm.prompts=2048"}}};
  std::set<std::string> names;
  for (const Case& c : cases) {
    INFO(c.model << " " << (c.sets.empty() ? "" : c.sets.back()));
    const auto p = tree_pricer(c.model, c.sets);
    const RlPoint point = p->point();
    RolloutParts parts;
    const RolloutPrice price = p->rl().price_rollout(point), again = p->rl().price_rollout(point, &parts);
    REQUIRE(price.fits);
    // Collecting changes no bit.
    CHECK(again.prefill_seconds == price.prefill_seconds);
    CHECK(again.decode_seconds == price.decode_seconds);
    CHECK(again.tail_seconds == price.tail_seconds);
    const std::vector<CostNode> nodes = nodes_of(*p);
    CHECK(nodes[0].seconds == price.prefill_seconds);
    CHECK(nodes[1].seconds == price.decode_seconds);
    CHECK(nodes[2].seconds == price.tail_seconds);
    for (const CostNode& n : nodes) {
      CHECK((n.children.empty() == (n.seconds == 0.0) || n.name == "exchange"));
      check_sums(n), collect(n, names);
    }
  }
  for (const char* name : {"q, k, v",
                           "attention's output",
                           "latent projections",
                           "mlp",
                           "experts",
                           "head",
                           "attention",
                           "norms, positions, gates",
                           "logits",
                           "tp all-reduce",
                           "experts' all-to-all",
                           "experts' all-reduce",
                           "cp keys, values and sums",
                           "logits' gather",
                           "tp gather behind a hop",
                           "hops between stages",
                           "kernels' start and drain",
                           "host",
                           "ids up, tokens down",
                           "filling",
                           "held"}) {
    INFO(name);
    CHECK(names.contains(name));
  }
}

TEST_CASE("worked: where a decode step's time goes") {
  // Engines of two ranks decode 64 sequences, 8 at a time.
  const auto p = tree_pricer("qwen2.5-7b", {});
  const RlModel& rl = p->rl();
  const CostModel& c = p->train().cost();
  RolloutParts parts;
  const RolloutPrice price = rl.price_rollout(p->point(), &parts);
  REQUIRE(price.decode_seconds > 0);
  const StepParts& d = parts.decode;
  CHECK(d.tokens == Approx(8 * d.steps));
  CHECK(d.steps + parts.tail.steps == Approx(price.steps));
  // Every response token but the first comes out of a step; a quarter of the tail counts at least one.
  CHECK(d.tokens + parts.tail.tokens >= 64 * 1535.0);
  CHECK(d.tokens + parts.tail.tokens < 1.05 * 64 * 1535.0);
  const DType bf16 = DType::bf16;
  const double h = 3584, held = rl.held_tokens(), cache = 8 * held * 2 * 128 * 2 * 2;  // K, V of 2 heads of 128
  const auto seconds = [&](StepPart part) { return d.of(part).seconds / d.steps; };
  CHECK(seconds(StepPart::qkv) == Approx(28 * c.gemm_seconds(8, 1792 + 512, h, bf16)));
  CHECK(seconds(StepPart::output) == Approx(28 * c.gemm_seconds(8, h, 1792, bf16)));
  CHECK(seconds(StepPart::mlp) ==
        Approx(28 * (c.gemm_seconds(8, 2 * 9472, h, bf16) + c.gemm_seconds(8, h, 9472, bf16))));
  CHECK(seconds(StepPart::head) == Approx(c.gemm_seconds(8, 152064.0 / 2, h, bf16)));
  CHECK(seconds(StepPart::attention) ==
        Approx(28 * c.attention_seconds(4 * 28 * 128 * 8 * held / 2, held, cache, false, c.peak_flops(bf16))));
  CHECK(seconds(StepPart::reduce) ==
        Approx(57 * c.collective_seconds(OpKind::all_reduce, GroupShape::strided(2, 1, 8), 8 * h * 2)));
  CHECK(seconds(StepPart::kernels) == Approx((28 * 10 + 6) * c.hardware().kernel_overhead.value));
  // And what it is told to be: bytes of the weights, in elements of 2 B.
  const double mlp = 3 * h * 9472 * 28 * 2;
  CHECK(d.of(StepPart::mlp).bytes / d.steps == Approx(mlp));
  CHECK(d.of(StepPart::attention).bytes / d.steps == Approx(28 * cache));
  CHECK(d.of(StepPart::reduce).calls / d.steps == Approx(57));
  const std::vector<CostNode> nodes = nodes_of(*p);
  REQUIRE(find({nodes[1]}, "mlp") != nullptr);
  CHECK(find({nodes[1]}, "mlp")->why == "5.31 GiB of weights a step");
  CHECK_THAT(nodes[1].why, Catch::Contains("of 8 sequences, ") && Catch::Contains("tokens of context each"));
}

TEST_CASE("a step that the host cannot launch in time says how long the device waits") {
  const auto p = tree_pricer("qwen2.5-0.5b", {"rollout.engine=hotbunk", "rollout.layout={tp: 1, dp: 32}"});
  RolloutParts parts;
  p->rl().price_rollout(p->point(), &parts);
  const double launches = 24 * 10 + 6, each = p->train().cost().hardware().launch.value;
  CHECK(parts.decode.total / parts.decode.steps == Approx(launches * each));
  CHECK(parts.decode.of(StepPart::launches).seconds > 0);
  // SGLang's steps replay a graph.
  RolloutParts replayed;
  const auto graphs = tree_pricer("qwen2.5-0.5b", {"rollout.layout={tp: 1, dp: 32}"});
  graphs->rl().price_rollout(graphs->point(), &replayed);
  CHECK(replayed.decode.of(StepPart::launches).seconds == 0);
  CHECK(replayed.prefill.of(StepPart::launches).calls > 0);
}

TEST_CASE("stages: what paces the engine is what is told") {
  const auto p = tree_pricer("qwen2.5-7b", {"rollout.layout={tp: 2, pp: 4, dp: 4}", "rollout.max_running_requests=64"});
  RolloutParts parts;
  const RolloutPrice price = p->rl().price_rollout(p->point(), &parts);
  REQUIRE(price.decode_seconds > 0);
  // Full: four micro-batches through the last stage, which has the head: its weights four times a step, no hop.
  const double head = 152064.0 * 3584 / 2 * 2;
  CHECK(parts.decode.of(StepPart::head).bytes / parts.decode.steps == Approx(4 * head));
  CHECK(parts.decode.of(StepPart::hops).seconds == 0);
  // The last ones go through all stages: 28 layers, the head once, hops between them.
  const double mlp = 3.0 * 3584 * 9472 * 2;
  CHECK(parts.tail.of(StepPart::hops).seconds > 0);
  const RolloutPoint r = p->point().rollout;
  StepParts one;
  const EngineStep step(p->rl(), r);
  each_stage(p->train().model(), RolloutEngine::sglang, 4, [&](const RolloutStage& s, std::int64_t count) {
    one.add(step.decode<StepParts>(s, 1, 1000), static_cast<double>(count));
  });
  CHECK(one.of(StepPart::mlp).bytes == Approx(28 * mlp));
  CHECK(one.of(StepPart::head).bytes == Approx(head));
  CHECK(one.total + step.hops_seconds(1, 1) == Approx(p->rl().decode_round(r, 1, 1000).seconds()));
}

}  // namespace hotbunk
