// explain and sweep beside the lowered plan: the same bytes.
#include "planner/answers/plan_answer.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>

#include "lowering/lower.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"
#include "tests/blocks.h"
#include "tests/paths.h"
#include "trace/static_memory.h"
#include "trace/traffic_rules.h"

using namespace hotbunk;

namespace {

Scenario shipped(const std::string& name, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario(fmt::format("{}/scenarios/{}.yaml", source_folder, name), sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

Explanation explanation_of(const Scenario& s) {
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) FAIL(render(pricer.error()));
  return explain(**pricer);
}

double plan_peak(const Scenario& s) { return static_cast<double>(static_memory(*lower(s), 0).device.peak_bytes); }

/// Wire bytes of rank 0 by phase and kind, of the collectives that every micro-batch makes.
std::map<std::string, double> micro_batch_wire(const Plan& plan, std::int64_t micro_batches) {
  std::map<std::string, double> out;
  for (const char* phase : {"reference", "old_logprobs", "train"})
    if (const std::int32_t p = plan.phase_index(phase); p >= 0)
      for (const Block& block : plan.program(0).phases[static_cast<std::size_t>(p)])
        for (const Op& op : test::ops_of(plan.program(0), block))
          if (op.kind == OpKind::all_gather || op.kind == OpKind::reduce_scatter)
            out[fmt::format("{} {}", phase, name_of(op.kind))] += static_cast<double>(
                micro_batches * traffic_of(op, {}, plan.num_ranks(), places_of(plan, 0)).wire_bytes);
  return out;
}

}  // namespace

TEST_CASE("explain answers with the plan's bytes where the scenario is lowered") {
  const std::vector<Scenario> scenarios = {
      shipped("demo"),
      shipped("qwen2.5-0.5b-cpu"),
      shipped("qwen2.5-7b-fsdp8"),
      shipped("demo", {"rollout.sleep_level=1", "train.precision.params=bf16", "sync.transport=collective"}),
      shipped("demo", {"cluster.device_memory_mib=2"}),  // does not fit, and says so
      shipped("demo",
              {"cluster.device_memory_mib=5.3"}),  // live bytes would fit, with the gaps between them it does not
      shipped("demo", {"algorithm.name=sft", "algorithm.samples_per_prompt=1"})};
  for (const Scenario& s : scenarios) {
    INFO(s.name);
    const auto plan = lower(s);
    REQUIRE(plan.has_value());
    const Explanation e = explanation_of(s);
    const RankMemory graph = static_memory(*plan, 0);
    CHECK(e.price.peak_bytes() == static_cast<double>(graph.device.peak_bytes));
    CHECK(e.memory.bytes == e.price.peak_bytes());
    CHECK(e.price.host_bytes == static_cast<double>(graph.host.peak_bytes));
    CHECK(e.price.fits == check_fit(*plan).fits);
    CHECK(e.memory.children.size() == plan->phases.size());
    for (const CostNode& phase : e.memory.children) {
      double parts = 0;
      for (const CostNode& part : phase.children) parts += part.bytes;
      if (!phase.children.empty()) CHECK(parts == phase.bytes);
    }
    // "train", "gradients reduce_scatter" -> "train reduce_scatter"
    std::map<std::string, double> links;
    for (const LinkUse& u : e.links)
      links[fmt::format("{} {}", name_of(u.phase), u.what.substr(u.what.find(' ') + 1))] = u.node_wire;
    for (const auto& [name, wire] : micro_batch_wire(*plan, expected_runs(s, e.point).micro_batches)) {
      INFO(name);
      CHECK(links[name] == wire);
    }
  }
  CHECK_FALSE(explanation_of(scenarios[4]).price.fits);
  // The bytes that decide are shown: 5,429,892 live are 5.18 MiB of 5.3.
  const Explanation gaps = explanation_of(scenarios[5]);
  CHECK(gaps.mapped_bytes == static_cast<double>(check_fit(*lower(scenarios[5])).mapped_peak_bytes));
  CHECK_THAT(render(gaps), Catch::Contains("device: live 5.18 MiB, mapped ") && Catch::Contains("it does not fit"));
}

TEST_CASE("levers and sweeps compare plans with plans where both are lowered") {
  // docs/memory.md works the three by hand.
  const double none = 5'429'892, selective = 4'835'460, full = 3'646'596;
  std::map<std::string, double> bytes;
  for (const Lever& l : explanation_of(shipped("demo")).levers) bytes[l.change] = l.bytes;
  CHECK(bytes.at("train.recompute = selective") == selective - none);
  CHECK(bytes.at("train.recompute = full") == full - none);
  CHECK(bytes.at("rollout.layout.tp doubled") ==
        plan_peak(shipped("demo", {"rollout.layout.tp=4", "rollout.layout.dp=1"})) - none);

  const auto axis = parse_axis("train.recompute=none,selective,full");
  REQUIRE(axis.has_value());
  const auto rows = sweep(std::string(source_folder) + "/scenarios/demo.yaml", {}, {*axis}, catalog_root());
  REQUIRE((rows.has_value() && rows->size() == 3));
  CHECK((*rows)[0].peak_bytes == none);
  CHECK((*rows)[1].peak_bytes == selective);
  CHECK((*rows)[2].peak_bytes == full);
  // 64 prompts x 8 samples of 5 + 4 tokens, however the micro-batches are filled.
  for (const SweepRow& r : *rows) CHECK(r.tokens_per_second == Approx(64 * 8 * 9 / r.iteration_seconds));

  const auto ranks = parse_axis("train.layout.dp=3");
  const auto invalid = sweep(std::string(source_folder) + "/scenarios/demo.yaml", {}, {*ranks}, catalog_root());
  REQUIRE(invalid.has_value());
  CHECK_THAT((*invalid)[0].why, Catch::Contains("mesh does not cover the cluster: dp 3"));
}

TEST_CASE("A lever that stays lowered says what explain says of its flags") {
  int lowered = 0;
  for (const char* file : {"demo", "qwen2.5-7b-fsdp8"}) {
    const Scenario s = shipped(file);
    const auto pricer = ScenarioPricer::make(s, catalog_root());
    REQUIRE(pricer.has_value());
    const Explanation here = explain(**pricer);
    for (const Lever& l : here.levers) {
      const Scenario there = shipped(file, l.flags);
      if (!unsupported_to_execute(there).empty()) continue;
      INFO(file << " " << l.change);
      const auto other = ScenarioPricer::make(there, catalog_root());
      REQUIRE(other.has_value());
      const Explanation e = explain(**other);
      CHECK(e.price.fits == l.fits);
      CHECK(e.price.peak_bytes() - here.price.peak_bytes() == l.bytes);
      // Of another rollout layout a lever estimates what an update receives; explain counts it.
      CHECK(e.price.iteration_seconds - here.price.iteration_seconds ==
            Approx(l.seconds).epsilon(2e-3).margin(1e-9 * here.price.iteration_seconds));
      ++lowered;
    }
  }
  CHECK(lowered >= 8);
}

TEST_CASE("Only knobs that stay lowered are turned in the plan") {
  const Scenario s = shipped("demo");
  const RlPoint from = rl_point_of(s);
  RlPoint to = from;
  to.train.optimizer = OptimizerName::muon;
  CHECK_FALSE(scenario_at(s, to).has_value());
  to = from;
  to.train.micro_batch *= 2;
  const auto doubled = scenario_at(s, to);
  REQUIRE(doubled.has_value());
  CHECK(doubled->train.micro_batch_tokens == 2 * s.train.micro_batch_tokens);
  to = from;
  to.rollout.tp = 4, to.rollout.engines = 1, to.bucket_bytes = 4096;
  const auto other = scenario_at(s, to);
  REQUIRE(other.has_value());
  CHECK(other->rollout.layout.tp == 4);
  CHECK(other->sync.bucket_bytes == 4096);
  RlPrice price;
  const auto pricer = ScenarioPricer::make(s, catalog_root());
  REQUIRE(pricer.has_value());
  CHECK(use_plan_at(s, to, (*pricer)->train().cost(), price));
  CHECK(price.peak_bytes() == plan_peak(*other));
  Scenario long_samples = s;
  long_samples.workload.response_tokens.max = 600;  // a micro-batch has 576 tokens
  CHECK_FALSE(scenario_at(long_samples, to).has_value());
}
