// Everything that the planner says it prices: profiles, engines, families, precisions, networks; and the allocator's
// replay.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

std::unique_ptr<ScenarioPricer> scope_pricer(const std::string& text, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario_text(text, "scope.yaml", sets);
  if (!s) FAIL(render(s.error()));
  auto p = ScenarioPricer::make(*s, catalog_root());
  if (!p) FAIL(render(p.error()));
  return std::move(*p);
}

std::string scenario(const std::string& model, const std::string& gpu, const std::string& train,
                     const std::string& rest = "") {
  return fmt::format(
      "model: {}\ncluster: {{gpu: {}, nodes: 4, gpus_per_node: 8}}\ntrain: {{{}, recompute: full, micro_batch_tokens: "
      "1536}}\nrollout: {{layout: {{tp: 4, dp: 8}}}}\nalgorithm: {{prompts: 64, samples_per_prompt: 4}}\n"
      "workload: {{prompt_tokens: {{mean: 256, max: 512}}, response_tokens: {{mean: 512, max: 1024}}}}\n{}",
      model, gpu, train, rest);
}

}  // namespace

TEST_CASE("every model of the catalogue is priced") {
  for (const std::string& name : catalog_names("models")) {
    INFO(name);
    const auto s = load_scenario_text(
        fmt::format("model: {}\ncluster: {{gpu: h200-sxm-141gb, nodes: 32, gpus_per_node: 8}}\n"
                    "train: {{engine: megatron, layout: {{dp: 256}}, micro_batch_tokens: 1024}}\n"
                    "algorithm: {{name: sft, prompts: 256}}\n"
                    "workload: {{prompt_tokens: {{mean: 256, max: 512}}, response_tokens: {{mean: 256, max: 512}}}}\n",
                    name),
        "catalogue.yaml");
    if (!s) FAIL(render(s.error()));
    const auto p = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(p.has_value());
    const RlPrice price = (*p)->price((*p)->point());
    CHECK(price.iteration_seconds > 0);
    // Parameters and fp32 gradients of the whole model, 6 B each, on every rank.
    CHECK(price.peak_bytes() > 6.0 * static_cast<double>(parameter_count(s->model)));
  }
}

TEST_CASE("what a GPU lacks is answered with what the key takes, and a size that does not divide with its arithmetic") {
  const auto s = load_scenario_text(scenario("qwen2.5-7b", "a100-sxm-80gb", "layout: {dp: 32}, precision: {gemm: fp8}"),
                                    "fp8.yaml");
  REQUIRE(s.has_value());
  const auto lacks = ScenarioPricer::make(*s, catalog_root());
  REQUIRE_FALSE(lacks.has_value());
  CHECK(lacks.error()[0].code == "E260");
  CHECK_THAT(lacks.error()[0].help, Catch::StartsWith("set train.precision.gemm to params or tf32, or give"));
  const auto p = scope_pricer(scenario("mixtral-8x7b", "h100-sxm-80gb", "engine: megatron, layout: {dp: 32, ep: 8}"));
  TrainPoint point = p->point().train;
  CHECK(p->train().why_invalid(point).empty());
  point.etp = 3;  // 14336 = 3 x 4778 + 2
  CHECK(p->train().why_invalid(point) == "14336 columns of an expert % etp 3 = 2");
  point.etp = 8;
  CHECK(p->train().why_invalid(point) == "32 ranks of a pipeline stage % (ep 8 x etp 8 = 64) = 32");
  point.etp = 0;
  CHECK(p->train().why_invalid(point) == "etp is 0");
  point.etp = 1, point.fsdp = 5;
  CHECK(p->train().why_invalid(point) == "32 data ranks % fsdp 5 = 2");
}

TEST_CASE("every profile of the profile key is priced, and says what hardware it stands on") {
  // One set for users and for `validate`.
  std::vector<std::string> names = find_scenario_key("profile")->choices;
  std::ranges::sort(names);
  REQUIRE(names == catalog_names("frameworks"));
  for (const std::string& profile : names) {
    INFO(profile);
    const auto p = scope_pricer(scenario("qwen2.5-7b", "h100-sxm-80gb", "engine: fsdp2, layout: {dp: 32}",
                                         fmt::format("profile: {}\n", profile)));
    const Explanation e = explain(*p);
    CHECK(e.framework == profile);
    CHECK(e.price.iteration_seconds > 0);
    // Users of PyTorch see what is reserved; hotbunk's own arena has no such thing.
    CHECK((e.torch.reserved > 0) == (profile != "hotbunk"));
    CHECK((render(e).find("reserved") != std::string::npos) == (profile != "hotbunk"));
  }
}

TEST_CASE("every engine and parallel dimension is priced for every family") {
  const struct {
    const char *model, *train;
  } cases[] = {
      {"qwen2.5-7b", "engine: ddp, layout: {dp: 32}"},
      {"qwen2.5-7b", "engine: zero1, layout: {dp: 32}"},
      {"qwen2.5-7b", "engine: zero2, layout: {dp: 32}"},
      {"qwen2.5-7b", "engine: fsdp1, layout: {dp: 32}"},
      {"qwen2.5-7b", "engine: fsdp2, layout: {dp: 32, fsdp: 8}"},
      {"qwen2.5-7b", "engine: fsdp2, layout: {dp: 8, ulysses: 4}"},
      {"qwen2.5-7b", "engine: fsdp2, layout: {dp: 8, cp: 4}"},
      {"llama-3.1-70b", "engine: megatron, layout: {dp: 2, tp: 4, sp: true, pp: 4, vpp: 2}"},
      {"qwen3-30b-a3b", "engine: megatron, layout: {dp: 8, tp: 4, ep: 8, etp: 2}"},
      {"mixtral-8x7b", "engine: megatron, layout: {dp: 4, tp: 4, pp: 2, ep: 8}"},
      {"deepseek-v2", "engine: megatron, layout: {dp: 8, tp: 2, pp: 2, ep: 16}"},
  };
  double least = 1e300;
  for (const auto& c : cases) {
    INFO(c.model << " " << c.train);
    const auto p = scope_pricer(scenario(c.model, "h200-sxm-141gb", c.train));
    const TrainPrice price = p->train().price(p->point().train);
    CHECK(price.valid);
    CHECK(price.step_seconds > 0);
    CHECK(price.state_bytes > 0);
    least = std::min(least, price.state_bytes);
  }
  // The most sharded of a 7B is 16 B / 32 per parameter: nothing may fall below.
  CHECK(least > 7.6e9 * 16 / 32 * 0.99);
}

TEST_CASE("PPO pays for a critic: its state beside the actor's, its values, its training") {
  const auto priced = [](const char* algorithm) {
    return scope_pricer(scenario("qwen2.5-7b", "h100-sxm-80gb", "engine: fsdp2, layout: {dp: 32}"),
                        {fmt::format("algorithm.name={}", algorithm)});
  };
  const auto grpo = priced("grpo"), ppo = priced("ppo");
  const RlPrice without = grpo->rl().price(grpo->point()), with = ppo->rl().price(ppo->point());
  const auto at = [](const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; };
  CHECK(at(without, RlPhase::values) == 0.0);
  CHECK(at(without, RlPhase::critic) == 0.0);
  // The actor's passes without the head: 152,064 x 3584 of its 7.07e9 elements that multiply.
  CHECK(at(with, RlPhase::values) < at(with, RlPhase::old_logprobs));
  CHECK(at(with, RlPhase::values) > 0.8 * at(with, RlPhase::old_logprobs));
  CHECK(at(with, RlPhase::critic) < at(with, RlPhase::train));
  CHECK(at(with, RlPhase::critic) > 0.8 * at(with, RlPhase::train));
  CHECK(at(with, RlPhase::train) == at(without, RlPhase::train));
  // All but the head and a hidden-wide row for the value: fp32 master and two moments over 32 ranks.
  const double elements = 7'615'616'512.0 - 152'064.0 * 3584 + 3584;
  CHECK(with.train_bytes - without.train_bytes == Approx(elements * 12 / 32).epsilon(1e-6));
  CHECK(with.host_bytes - without.host_bytes == Approx(elements * 12 / 32).epsilon(1e-6));  // asleep
  CHECK(with.rollout_bytes == without.rollout_bytes);
  CHECK(at(with, RlPhase::sleep) > at(without, RlPhase::sleep));
  // 32 ranks on 4 nodes: a rank sends 31/32 of the fp32 gradients, one eighth of it over the network; its state sleeps.
  double gradients = 0, network = 0, values = 0, asleep = 0;
  for (const LinkUse& l : explain(*ppo).links) {
    if (l.phase == RlPhase::critic && l.what == "dp gradients")
      gradients = l.node_wire + l.network_wire, network = l.network_wire;
    if (l.phase == RlPhase::values && l.what == "dp parameters") values = l.node_wire + l.network_wire;
    if (l.phase == RlPhase::sleep) asleep += l.host_bytes;
  }
  for (const LinkUse& l : explain(*grpo).links)
    if (l.phase == RlPhase::sleep) asleep -= l.host_bytes;
  const auto micro_batches = static_cast<double>(ppo->point().train.micro_batches);
  CHECK(gradients == Approx(micro_batches * elements * 4 * 31 / 32).epsilon(1e-6));
  CHECK(network == Approx(gradients / 8));
  CHECK(values == Approx(micro_batches * elements * 2 * 31 / 32).epsilon(1e-6));
  CHECK(asleep == Approx(elements * 12 / 32).epsilon(1e-6));
}

TEST_CASE("narrow precisions and GB200, GB300, B300: datasheet rates, marked uncalibrated") {
  for (const char* gpu : {"gb200-nvl72", "gb300-nvl72", "b300-sxm-288gb"}) {
    INFO(gpu);
    const auto bf16 = scope_pricer(scenario("qwen2.5-7b", gpu, "engine: fsdp2, layout: {dp: 32}"));
    const Explanation e = explain(*bf16);
    CHECK_THAT(e.hardware, Catch::Contains("uncalibrated"));
    CHECK_FALSE(e.calibrated);
    const auto compute = [](const ScenarioPricer& p) {
      const auto seconds = p.train().price(p.point().train).seconds;
      return seconds[static_cast<std::size_t>(Term::compute)] + seconds[static_cast<std::size_t>(Term::recompute)];
    };
    double before = compute(*bf16);
    for (const char* format : {"fp8", "mxfp8", "nvfp4"}) {
      INFO(format);
      const auto p = scope_pricer(scenario("qwen2.5-7b", gpu, "engine: fsdp2, layout: {dp: 32}"),
                                  {fmt::format("train.precision.gemm={}", format)});
      CHECK_THAT(explain(*p).hardware, Catch::Contains(format) && Catch::Contains("uncalibrated"));
      // MXFP8 runs at FP8's rate on these and needs no pass for a tensor's maximum; NVFP4 is faster than both.
      const double seconds = compute(*p);
      CHECK(seconds < before);
      before = seconds;
    }
  }
  // A calibrated GPU says so for its own precision, not for a narrower one.
  const auto plain = scope_pricer(scenario("qwen2.5-7b", "h100-sxm-80gb", "engine: fsdp2, layout: {dp: 32}"));
  CHECK_THAT(explain(*plain).hardware, !Catch::Contains("uncalibrated"));
  const auto narrow = scope_pricer(scenario("qwen2.5-7b", "h100-sxm-80gb", "engine: fsdp2, layout: {dp: 32}"),
                                   {"train.precision.gemm=fp8"});
  CHECK_THAT(explain(*narrow).hardware, Catch::Contains("uncalibrated"));
}

TEST_CASE("networks: switches that reduce, an oversubscribed spine, pods that pass it by") {
  const auto cost = [](const std::vector<std::string>& sets) {
    const auto p = scope_pricer(scenario("qwen2.5-7b", "h200-sxm-141gb", "engine: fsdp2, layout: {dp: 32}"), sets);
    return p->train().cost();
  };
  const double bytes = 1e9;
  const auto reduce = [&](const CostModel& m, std::int64_t nodes) {
    return m.collective_seconds(OpKind::all_reduce, GroupShape::strided(8 * nodes, 1, 8), bytes);
  };
  const CostModel plain = cost({}), ring = cost({"cluster.gpu.nvlink_sharp=false"}),
                  thin = cost({"cluster.oversubscription=4"}),
                  pods = cost({"cluster.oversubscription=4", "cluster.pod_nodes=2"});
  CHECK(reduce(plain, 1) < reduce(ring, 1));
  CHECK(reduce(thin, 1) == reduce(plain, 1));
  // 8 ports of 45 GB/s: 2 x 31/32 x 1 GB / 8 / 45 GB/s = 5.4 ms, times 4 on the spine.
  CHECK(reduce(thin, 4) - reduce(plain, 4) > 3.0 * 2 * 31 / 32 * bytes / 8 / 45e9 * 0.5);
  CHECK(reduce(pods, 2) == reduce(plain, 2));
  CHECK(reduce(pods, 4) == reduce(thin, 4));
  // Two ranks on neighbouring nodes stay in the pod; two that are three nodes apart do not.
  const auto pair = [&](const CostModel& m, std::int64_t stride) {
    return m.collective_seconds(OpKind::all_gather, GroupShape::strided(2, stride, 8), bytes);
  };
  CHECK(pair(pods, 8) == pair(plain, 8));
  CHECK(pair(pods, 24) == pair(thin, 24));
  CHECK(pair(thin, 24) > 3 * pair(plain, 24));
}

TEST_CASE("the allocator's replay of a step holds what the closed form says, and reserves more") {
  auto s = load_scenario_text(
      "model: llama-3.1-8b\ncluster: {gpu: h100-sxm-80gb, nodes: 1}\ntrain: {layout: {dp: 8}}\n"
      "rollout: {layout: {dp: 8}}\n",
      "replay");
  REQUIRE(s.has_value());
  const auto frame = framework_named("megatron", catalog_root());
  REQUIRE(frame.has_value());
  const TrainModel m(s->model, {.sequence = 4096}, CostModel(hardware_from_datasheet(s->cluster), s->cluster), *frame);
  const auto replay = [&](const TrainPoint& p) { return replay_step(m, p); };
  for (Recompute r : {Recompute::none, Recompute::selective, Recompute::full})
    for (std::int64_t pp : {1, 4}) {
      const TrainPoint p{.dp = 2, .tp = 2, .pp = pp, .sp = true, .recompute = r, .micro_batches = 8};
      const ReservedMemory got = replay(p);
      INFO("recompute " << static_cast<int>(r) << " pp " << pp);
      CHECK(static_cast<double>(got.allocated) == Approx(m.price(p).peak_bytes).epsilon(0.05));
      CHECK(got.reserved >= got.allocated);
      CHECK(got.reserved % (2 << 20) == 0);  // whole segments
      CHECK(got.unused() < 0.25);
    }
  const TrainPoint p{.dp = 2, .tp = 2, .pp = 4, .micro_batches = 8};
  TrainPoint recomputed = p;
  recomputed.recompute = Recompute::full;
  CHECK(replay(recomputed).reserved < replay(p).reserved);
  // The first stage holds 4 micro-batches of 8 layers, the last one.
  CHECK(replay_step(m, p, 0).allocated > replay_step(m, p, 1).allocated);
  TrainPoint odd = p;
  odd.tp = 3;
  CHECK(replay(odd).reserved == 0);
  // FSDP: units come and go.
  const ReservedMemory fsdp = replay({.dp = 8, .sharding = Sharding::fsdp, .recompute = Recompute::full});
  CHECK(static_cast<double>(fsdp.allocated) ==
        Approx(m.price({.dp = 8, .sharding = Sharding::fsdp, .recompute = Recompute::full}).peak_bytes).epsilon(0.15));
}

}  // namespace hotbunk
