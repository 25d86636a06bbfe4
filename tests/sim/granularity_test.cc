// The short ways of the simulator beside its long one: op by op, each rank by itself, a decode step at a time.
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "sim/affine_sum.h"
#include "sim/disturbed_cost.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/drawn_scenario.h"
#include "tests/paths.h"

using namespace hotbunk;

namespace {

struct Way {
  Granularity granularity = Granularity::ops;
  bool steps_together = false, folded = false;
  const CostModel* links = nullptr;
  std::vector<RankFactors> slow{};
};

/// A rank whose kernels take longer, as its neighbours' do not.
struct Straggler final : OpCost {
  const OpCost& cost;
  Rank slow;
  Straggler(const OpCost& c, Rank r) : cost(c), slow(r) {}
  std::int64_t nanoseconds(const Plan& plan, Rank r, const Op& op, const Args& args) const override {
    const std::int64_t ns = cost.nanoseconds(plan, r, op, args);
    return r == slow && is_compute(op.kind) ? 2 * ns : ns;
  }
  std::int64_t rank_class(Rank r) const override { return r == slow ? 1 : 0; }
};

struct Simulated {
  Trace trace;
  std::size_t players = 0;
};

Simulated simulate_lengths(const Plan& plan, const Scenario& scenario, const OpCost& cost, const Way& way) {
  auto driver = LengthDriver::create(plan, scenario);
  if (!driver) throw std::runtime_error(render(driver.error()));
  if (way.steps_together) (*driver)->take_steps_together();
  const auto steps = static_cast<std::int32_t>(scenario.steps);
  SimOptions options;
  options.granularity = way.granularity;
  options.enforce_capacity = false;
  options.links = way.links;
  options.slow = way.slow;
  const std::int64_t node = scenario.cluster.gpus_per_node;
  const std::vector<std::int64_t> neighbours = {node / scenario.cluster.even_numa_domains(), node};
  if (way.folded) options.classes = RankClasses::fold(plan, cost, (*driver)->rank_classes(1, steps), neighbours);
  const std::vector<Rank> players = options.classes.value_or(RankClasses::unfolded(plan.num_ranks())).players();
  SimBackend backend(scenario.cluster, cost, options);
  auto trace = execute(plan, backend, **driver, {.steps = steps, .local_ranks = players});
  if (!trace) throw std::runtime_error(render(trace.error()));
  return {std::move(*trace), players.size()};
}

/// Every rank's stays, within so many ns, and to this share of them.
bool same_times(const Trace& a, const Trace& b, std::int64_t most_ns, double share = 0.0) {
  if (a.phases.size() != b.phases.size()) return false;
  for (std::size_t i = 0; i < a.phases.size(); ++i) {
    const PhaseSpan &x = a.phases[i], &y = b.phases[i];
    if (x.rank != y.rank || x.step != y.step || x.phase != y.phase || x.blocks != y.blocks) return false;
    const double most = static_cast<double>(most_ns) + share * static_cast<double>(x.end_ns);
    for (const std::int64_t difference : {x.start_ns - y.start_ns, x.end_ns - y.end_ns, x.waiting_ns - y.waiting_ns})
      if (std::abs(static_cast<double>(difference)) > most) return false;
  }
  return true;
}

bool same_bytes(const Trace& a, const Trace& b) {
  return a.memory == b.memory && a.traffic == b.traffic && a.traffic_totals == b.traffic_totals;
}

struct Job {
  Scenario scenario;
  Plan plan;
};

Job lowered(const std::string& text) {
  auto scenario = load_scenario_text(text, "drawn.yaml");
  if (!scenario) throw std::runtime_error(render(scenario.error()));
  auto plan = lower(*scenario);
  if (!plan) throw std::runtime_error(render(plan.error()));
  return {std::move(*scenario), std::move(*plan)};
}

/// Eight ranks, 2 engines of 4, a small model; prompts and lengths as given.
std::string small_job(int prompts, const std::string& lengths, int nodes = 1) {
  return fmt::format(
      "name: small\n"
      "model: {{model_type: qwen2, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, "
      "num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 128, max_position_embeddings: 4096}}\n"
      "cluster: {{gpu: h100-sxm-80gb, nodes: {1}, gpus_per_node: 8}}\n"
      "train: {{layout: {{dp: {2}}}, micro_batch_tokens: 4096, offload: sleep}}\n"
      "rollout: {{engine: hotbunk, layout: {{tp: 4, dp: {3}}}, max_running_requests: 16, kv_cache_tokens: 4096, "
      "memory_fraction: 0.3}}\n"
      "algorithm: {{name: grpo, prompts: {0}, samples_per_prompt: 4}}\n"
      "workload: {{prompt_tokens: {{mean: 64, max: 64, distribution: fixed}}, response_tokens: {4}}}\nsteps: 2\n",
      prompts, nodes, 8 * nodes, 2 * nodes, lengths);
}
const std::string fixed_lengths = "{mean: 200, max: 200, distribution: fixed}";
const std::string drawn_lengths = "{mean: 200, max: 600, distribution: lognormal}";

}  // namespace

TEST_CASE("call by call is op by op, and several decode steps together are one after another") {
  CHECK(rc::check("drawn plans", [] {
    const std::string text = testing::draw_scenario();
    const auto scenario = load_scenario_text(text, "drawn.yaml");
    RC_PRE(scenario.has_value() && scenario->cluster.ranks_per_device == 1);
    const auto plan = lower(*scenario);
    RC_PRE(plan.has_value());
    RC_LOG() << text;
    const auto hardware = hardware_for(*scenario, catalog_root());
    RC_ASSERT(hardware.has_value());
    const CostModel model(*hardware, scenario->cluster);
    const ModelCost cost(model);
    const Trace ops = simulate_lengths(*plan, *scenario, cost, {}).trace;
    const Trace calls = simulate_lengths(*plan, *scenario, cost, {.granularity = Granularity::calls}).trace;
    RC_ASSERT(same_bytes(ops, calls));
    // Kernels that share a device are late by a nanosecond or so each time that others join or leave.
    RC_ASSERT(same_times(ops, calls, 100, 1e-5));
    const Simulated folded = simulate_lengths(
        *plan, *scenario, cost, {.granularity = Granularity::calls, .steps_together = true, .folded = true});
    RC_ASSERT(same_bytes(ops, folded.trace));
    RC_ASSERT(same_times(ops, folded.trace, 1000, 1e-4));
  }));
}

TEST_CASE("ranks that are alike are played by one, to the nanosecond") {
  for (const int nodes : {1, 2, 4}) {
    const Job job = lowered(small_job(16 * nodes, fixed_lengths, nodes));
    const auto hardware = hardware_for(job.scenario, catalog_root());
    REQUIRE(hardware);
    Hardware narrow = *hardware;  // where ranks that copy at once wait for each other
    narrow.host_memory_bandwidth.value = 0.02 * narrow.host_bandwidth.value;
    const CostModel model(narrow, job.scenario.cluster);
    const ModelCost cost(model);
    const Way alone{Granularity::calls, true, false}, shared{Granularity::calls, true, false, &model};
    CHECK_FALSE(same_times(simulate_lengths(job.plan, job.scenario, cost, alone).trace,
                           simulate_lengths(job.plan, job.scenario, cost, shared).trace, 0));
    for (const Granularity granularity : {Granularity::ops, Granularity::calls})
      for (const bool together : {false, true}) {
        if (together && granularity == Granularity::ops) continue;
        const Simulated unfolded =
            simulate_lengths(job.plan, job.scenario, cost, {granularity, together, false, &model});
        const Simulated folded = simulate_lengths(job.plan, job.scenario, cost, {granularity, together, true, &model});
        CAPTURE(nodes, together, folded.players, job.plan.num_ranks());
        CHECK(unfolded.players == static_cast<std::size_t>(job.plan.num_ranks()));
        CHECK(folded.players < unfolded.players);
        CHECK(same_times(unfolded.trace, folded.trace, 0));
        CHECK(same_bytes(unfolded.trace, folded.trace));
      }
  }
}

TEST_CASE("ranks that have other experts are alike, to the nanosecond and the byte") {
  // 2 stages of 2 x 4 ranks, each of which has 2 whole experts of 16.
  const Job job = lowered(
      "name: small\nsteps: 1\n"
      "model: {model_type: qwen3_moe, hidden_size: 64, intermediate_size: 128, moe_intermediate_size: 32, num_experts: "
      "16, "
      "num_experts_per_tok: 4, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 128, "
      "max_position_embeddings: 4096}\n"
      "cluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n"
      "train: {engine: zero1, layout: {dp: 4, tp: 2, pp: 2, ep: 8, etp: 1, sp: true}, micro_batch_tokens: 512}\n"
      "algorithm: {name: sft, prompts: 32}\n"
      "workload: {prompt_tokens: {mean: 64, max: 64, distribution: fixed}, response_tokens: " +
      fixed_lengths + "}\n");
  const auto hardware = hardware_for(job.scenario, catalog_root());
  REQUIRE(hardware);
  const CostModel model(*hardware, job.scenario.cluster);
  const ModelCost cost(model);
  const Simulated each = simulate_lengths(job.plan, job.scenario, cost, {Granularity::calls, true, false, &model}),
                  folded = simulate_lengths(job.plan, job.scenario, cost, {Granularity::calls, true, true, &model});
  CHECK(each.players == 16);
  CHECK(folded.players <= 12);  // apart are stages, the first of a group whose sums do not divide, who has expert 0
  CHECK(same_bytes(each.trace, folded.trace));
  CHECK(same_times(each.trace, folded.trace, 0));
}

TEST_CASE("a straggler and other lengths split a class, and nothing else changes") {
  const Job alike = lowered(small_job(32, fixed_lengths, 2)), drawn = lowered(small_job(32, drawn_lengths, 2));
  const auto hardware = hardware_for(alike.scenario, catalog_root());
  REQUIRE(hardware);
  const CostModel model(*hardware, alike.scenario.cluster);
  const ModelCost cost(model);
  Rank not_alone = 15;  // somebody who is played by another
  {
    auto driver = LengthDriver::create(alike.plan, alike.scenario);
    const RankClasses classes = RankClasses::fold(alike.plan, cost, (*driver)->rank_classes(1, 2));
    while (classes.plays(not_alone)) --not_alone;
  }
  const Straggler straggler(cost, not_alone);
  const Way unfolded{Granularity::calls, true, false}, folded{Granularity::calls, true, true};
  const Simulated even = simulate_lengths(alike.plan, alike.scenario, cost, folded);
  const Simulated slow = simulate_lengths(alike.plan, alike.scenario, straggler, folded);
  CAPTURE(even.players, slow.players);
  CHECK(slow.players > even.players);
  CHECK(slow.players < 16);
  const Simulated slow_unfolded = simulate_lengths(alike.plan, alike.scenario, straggler, unfolded);
  CHECK(same_times(slow_unfolded.trace, slow.trace, 0));
  CHECK(same_bytes(slow_unfolded.trace, slow.trace));
  CHECK_FALSE(same_times(slow.trace, even.trace, 0));

  const Simulated lengths = simulate_lengths(drawn.plan, drawn.scenario, cost, folded);
  CHECK(lengths.players > even.players);
  CHECK(same_times(simulate_lengths(drawn.plan, drawn.scenario, cost, unfolded).trace, lengths.trace, 0));
}

namespace {

/// Up to two slow ranks, a slow node and three slow links of any kind; at least one of all.
DisturbanceSpec draw_disturbances(const ClusterSpec& cluster) {
  const auto rank = [&] { return *rc::gen::inRange<std::int64_t>(0, cluster.nodes * cluster.gpus_per_node); };
  const auto node = [&] { return *rc::gen::inRange<std::int64_t>(0, cluster.nodes); };
  const auto factor = [] { return 1.0 + 0.125 * *rc::gen::inRange(1, 17); };
  const auto times = [](int most) { return *rc::gen::inRange(0, most + 1); };
  DisturbanceSpec out;
  for (int i = times(2); i > 0; --i) out.slow_ranks.push_back({.rank = rank(), .factor = factor()});
  for (int i = times(1); i > 0; --i) out.slow_nodes.push_back({.node = node(), .factor = factor()});
  for (int i = times(3); i > 0 || out.none(); --i) {
    const bool of_node = *rc::gen::arbitrary<bool>();
    out.slow_links.push_back({.rank = of_node ? -1 : rank(),
                              .node = of_node ? node() : -1,
                              .link = *rc::gen::element(LinkKind::network, LinkKind::nvlink, LinkKind::pcie),
                              .factor = factor()});
  }
  return out;
}

}  // namespace

TEST_CASE("whatever is disturbed splits the classes that it must, and folded is unfolded to the nanosecond") {
  std::size_t folded_ranks = 0, all_ranks = 0;
  CHECK(rc::check("drawn disturbances", [&] {
    const int nodes = *rc::gen::inRange(1, 4);
    const Job job = lowered(small_job(16 * nodes, fixed_lengths, nodes));
    const auto hardware = hardware_for(job.scenario, catalog_root());
    RC_ASSERT(hardware.has_value());
    const CostModel model(*hardware, job.scenario.cluster);
    const ModelCost undisturbed(model);
    const DisturbanceSpec disturbances = draw_disturbances(job.scenario.cluster);
    const DisturbedCost cost(undisturbed, disturbances, job.scenario.cluster);
    const std::vector<RankFactors> slow = rank_factors(disturbances, job.scenario.cluster);
    for (const CostModel* links : {static_cast<const CostModel*>(nullptr), &model}) {
      const Way unfolded{Granularity::calls, true, false, links, slow};
      Way folded = unfolded;
      folded.folded = true;
      const Simulated each = simulate_lengths(job.plan, job.scenario, cost, unfolded),
                      classes = simulate_lengths(job.plan, job.scenario, cost, folded);
      RC_ASSERT(same_times(each.trace, classes.trace, 0));
      RC_ASSERT(same_bytes(each.trace, classes.trace));
      folded_ranks += classes.players, all_ranks += each.players;
    }
  }));
  CHECK(folded_ranks < all_ranks * 9 / 10);  // they did not all split
}

TEST_CASE("where times scatter nobody is alike") {
  const Job job = lowered(small_job(16, fixed_lengths));
  const auto hardware = hardware_for(job.scenario, catalog_root());
  REQUIRE(hardware);
  const CostModel model(*hardware, job.scenario.cluster);
  const ModelCost undisturbed(model);
  DisturbanceSpec d;
  d.jitter = {.relative = 0.1, .seed = 3};
  const DisturbedCost cost(undisturbed, d, job.scenario.cluster);
  const Way unfolded{Granularity::calls, false, false, &model}, folded{Granularity::calls, false, true, &model};
  const Simulated each = simulate_lengths(job.plan, job.scenario, cost, unfolded),
                  classes = simulate_lengths(job.plan, job.scenario, cost, folded);
  CHECK(classes.players == each.players);
  CHECK(same_times(each.trace, classes.trace, 0));
}

TEST_CASE("the sum over an affine stretch is exact, over a kink and a curve nearly so") {
  const auto sum = [](auto f, std::int64_t n) {
    std::int64_t all = 0;
    for (std::int64_t i = 0; i < n; ++i) all += f(i);
    return all;
  };
  std::int64_t asked = 0;
  const auto line = [&](std::int64_t i) { return ++asked, 20'000 + 7 * i; };
  for (const std::int64_t n : {0, 1, 2, 3, 4, 999, 1000}) CHECK(sum_of_affine_pieces(line, n) == sum(line, n));
  asked = 0;
  sum_of_affine_pieces(line, 100'000);
  CHECK(asked == 3);
  const auto kink = [](std::int64_t i) { return std::max<std::int64_t>(50'000, 20'000 + 7 * i); };
  const auto curve = [](std::int64_t i) { return std::llround(1e4 * std::sqrt(100.0 + static_cast<double>(i))); };
  const auto near = [&](auto f) {
    const auto exact = static_cast<double>(sum(f, 10'000));
    return std::abs(static_cast<double>(sum_of_affine_pieces(f, 10'000)) - exact) <= 1e-5 * exact;
  };
  CHECK(near(kink));
  CHECK(near(curve));
}
