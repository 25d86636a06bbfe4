#include "sim/disturbed_cost.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "sim/cluster_links.h"
#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

ClusterSpec two_nodes_of_two() {
  ClusterSpec c;
  c.nodes = 2, c.gpus_per_node = 2;
  return c;
}

Slowdown slow(std::int64_t rank, std::int64_t node, double factor, LinkKind link = LinkKind::network) {
  return {.rank = rank, .node = node, .link = link, .factor = factor};
}

}  // namespace

TEST_CASE("disturbances: factors of a rank and of its node multiply") {
  DisturbanceSpec d;
  CHECK(rank_factors(d, two_nodes_of_two()).empty());
  d.slow_ranks = {slow(3, -1, 1.5)};
  d.slow_nodes = {slow(-1, 1, 2.0)};
  d.slow_links = {slow(-1, 0, 4.0), slow(1, -1, 3.0, LinkKind::pcie), slow(1, -1, 5.0, LinkKind::nvlink)};
  const std::vector<RankFactors> f = rank_factors(d, two_nodes_of_two());
  REQUIRE(f.size() == 4);
  CHECK(f[0] == RankFactors{1.0, 4.0, 1.0, 1.0});
  CHECK(f[1] == RankFactors{1.0, 4.0, 5.0, 3.0});
  CHECK(f[2] == RankFactors{2.0, 1.0, 1.0, 1.0});
  CHECK(f[3] == RankFactors{3.0, 1.0, 1.0, 1.0});
}

TEST_CASE("disturbances: a straggler's kernels, a slow link's collectives and copies") {
  Plan plan = test::empty_plan();
  plan.program_of_rank = {0, 0, 0, 0};
  plan.groups = {{"inside", {{0, 1}, {2, 3}}}, {"across", {{0, 2}, {1, 3}}}};
  const Prices prices{{"kernel", 100}, {"reduce", 1000}};
  DisturbanceSpec d;
  d.slow_ranks = {slow(2, -1, 1.5)};
  d.slow_links = {slow(3, -1, 2.0, LinkKind::network), slow(3, -1, 7.0, LinkKind::nvlink)};
  const DisturbedCost cost(prices, d, two_nodes_of_two());
  Op kernel, inside, across, map;
  kernel.kind = OpKind::add, kernel.name = "kernel";
  inside.kind = across.kind = OpKind::all_reduce, inside.name = across.name = "reduce";
  inside.group = 0, across.group = 1;
  map.kind = OpKind::map, map.name = "kernel";
  CHECK(cost.nanoseconds(plan, 0, kernel, {}) == 100);
  CHECK(cost.nanoseconds(plan, 2, kernel, {}) == 150);
  CHECK(cost.nanoseconds(plan, 2, map, {}) == 100);
  CHECK(cost.nanoseconds(plan, 2, across, {}) == 1000);  // a slow rank's links are as fast as any
  CHECK(cost.nanoseconds(plan, 3, across, {}) == 2000);  // its group leaves the node
  CHECK(cost.nanoseconds(plan, 1, across, {}) == 1000);  // the other member's answer: the slowest holds for all
  CHECK(cost.nanoseconds(plan, 3, inside, {}) == 7000);
  d.slow_links = {slow(3, -1, 4.0, LinkKind::pcie)};
  const DisturbedCost slow_pcie(prices, d, two_nodes_of_two());
  Op copy = kernel, local = kernel, feed = kernel;
  copy.kind = local.kind = OpKind::copy, feed.kind = OpKind::feed;
  copy.stream = streams::d2h, local.stream = streams::compute;
  CHECK(slow_pcie.nanoseconds(plan, 3, copy, {}) == 400);
  CHECK(slow_pcie.nanoseconds(plan, 3, feed, {}) == 400);
  CHECK(slow_pcie.nanoseconds(plan, 3, local, {}) == 100);
  CHECK(slow_pcie.nanoseconds(plan, 3, across, {}) == 1000);
  CHECK(slow_pcie.nanoseconds(plan, 2, copy, {}) == 100);  // a slow rank's copies are as fast as any
  CHECK_FALSE(cost.jitters());
  CHECK(cost.jitter(0, kernel, 1) == 1.0);
}

TEST_CASE("disturbances: one straggler makes all wait, in the simulation too") {
  // Each rank computes 100 ns, then they meet for 1000: 1100; rank 1 at half speed: 200 + 1000.
  for (const double factor : {1.0, 2.0}) {
    const auto kernel_of = [] { return kernel("kernel", streams::reduce); };
    Plan plan = plan_of({{kernel_of(), all_reduce("reduce", {8})}, {kernel_of(), all_reduce("reduce", {8})}});
    ClusterSpec cluster;
    cluster.gpus_per_node = 2;
    DisturbanceSpec d;
    if (factor != 1.0) d.slow_ranks = {slow(1, -1, factor)};
    const Prices prices{{"kernel", 100}, {"reduce", 1000}};
    const DisturbedCost cost(prices, d, cluster);
    const auto trace = simulate(plan, cost, 1, 1, {}, cluster);
    REQUIRE(trace);
    const auto begin = static_cast<std::int64_t>(100 * factor);
    CHECK(times(*trace, "reduce") == Times{{begin, begin + 1000}, {begin, begin + 1000}});
  }
}

TEST_CASE("disturbances: jitter has mean 1 and the deviation asked for, by rank and execution alone") {
  DisturbanceSpec d;
  d.jitter = {.relative = 0.2, .seed = 7};
  const Prices prices{{"kernel", 100}};
  const DisturbedCost cost(prices, d, two_nodes_of_two());
  Op kernel, reduce;
  kernel.kind = OpKind::add;
  reduce.kind = OpKind::all_reduce;
  REQUIRE(cost.jitters());
  double sum = 0, squares = 0;
  constexpr int draws = 40'000;
  for (int i = 0; i < draws; ++i) {
    const double x = cost.jitter(i % 4, kernel, static_cast<std::uint64_t>(i));
    CHECK(x > 0.0);
    sum += x, squares += x * x;
  }
  const double mean = sum / draws, deviation = std::sqrt(squares / draws - mean * mean);
  // The mean of 40,000 scatters by 0.2 / 200 = 0.001, the deviation by about as much: five of these.
  CHECK(std::abs(mean - 1.0) < 0.005);
  CHECK(std::abs(deviation - 0.2) < 0.007);
  CHECK(cost.jitter(1, kernel, 5) == cost.jitter(1, kernel, 5));
  CHECK(cost.jitter(1, kernel, 5) != cost.jitter(2, kernel, 5));
  CHECK(cost.jitter(1, kernel, 5) != cost.jitter(1, kernel, 6));
  CHECK(cost.jitter(1, reduce, 5) == 1.0);
  d.jitter.seed = 8;
  const DisturbedCost other(prices, d, two_nodes_of_two());
  CHECK(cost.jitter(1, kernel, 5) != other.jitter(1, kernel, 5));
  CHECK(cost.nanoseconds(test::empty_plan(), 0, kernel, {}) == prices.nanoseconds(test::empty_plan(), 0, kernel, {}));
}

TEST_CASE("disturbances: two collectives on a slow port share what it has left") {
  // 4.5 GB through 45 GB/s is 0.1 s, through a port at half rate 0.2 s: alone the doubled price, two of them 0.4 s.
  ClusterSpec c = two_nodes_of_two();
  c.gpu.name = "test-gpu";
  c.gpu.nvlink_bandwidth = {4.5e11, "test"};
  c.gpu.pcie_bandwidth = {5e10, "test"};
  c.network_bandwidth = {5e10, "test"};
  const CostModel model(hardware_from_datasheet(c), c);
  DisturbanceSpec d;
  d.slow_links = {slow(-1, 1, 2.0)};
  for (const int jobs : {1, 2}) {
    SharedLinks links;
    const ClusterLinks cluster(model, c, 4, links, rank_factors(d, c));
    const std::vector<Rank> pair = {0, 2};
    const std::int64_t price =
        2 * std::llround(1e9 * model.collective_seconds(OpKind::all_gather, model.shape_of(pair), 9e9));
    std::vector<Demand> demands;
    cluster.collective(cluster.links_of(pair), OpKind::all_gather, 9e9, price, demands);
    for (int j = 0; j < jobs; ++j) links.join(0, static_cast<std::uint32_t>(j), price, demands);
    if (jobs == 1) CHECK(links.next_done_ns() == price);
    else CHECK(std::abs(static_cast<double>(*links.next_done_ns()) - 0.4e9) <= 2.0);
  }
}
