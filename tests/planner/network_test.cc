// Collectives across nodes: algorithms, rails, pods and the spine.
#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "planner/cost/cost_model.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

ClusterSpec network_of(NetworkTopology topology = NetworkTopology::leaf, std::int64_t pod = 0, double spine = 1.0) {
  ClusterSpec c;
  c.gpu.name = "test-gpu";
  c.gpu.memory_bandwidth = {2e12, "test"};
  c.gpu.flops = {{"bf16", {3e14, "test"}}, {"fp32", {2e13, "test"}}};
  c.gpu.nvlink_bandwidth = {4.5e11, "test"};
  c.gpu.pcie_bandwidth = {5e10, "test"};
  c.network_bandwidth = {5e10, "test"};
  c.gpus_per_node = 8;
  c.nodes = 64;
  c.network_topology = topology;
  c.pod_nodes = pod;
  c.oversubscription = spine;
  return c;
}
CostModel network_model(const ClusterSpec& c) { return {hardware_from_datasheet(c), c}; }

}  // namespace

TEST_CASE("all-reduce across nodes: the best of ring, rails and trees") {
  ClusterSpec thin = network_of();
  thin.network_bandwidth.value = 1.25e10;  // the ports decide, not NVLink
  const CostModel m = network_model(thin);
  const Hardware& h = m.hardware();
  const double port = h.inter.bandwidth.value, bytes = 64e9;
  const auto seconds = [&](std::int64_t nodes, double payload) {
    return m.collective_seconds(OpKind::all_reduce, {8 * nodes, nodes, 8}, payload);
  };
  // Large: a reduce-scatter in the node leaves each of 8 ports an eighth, of which a ring over N nodes sends 2 (N-1)/N.
  // On two nodes that is once, where the flat ring over 16 ranks would send 2 x 15/16.
  CHECK(seconds(2, bytes) == Approx(bytes / 8 / port).epsilon(0.001));
  CHECK(seconds(4, bytes) == Approx(2 * 3.0 / 4 * bytes / 8 / port).epsilon(0.001));
  CHECK(seconds(2, bytes) < 0.6 * 2 * 15 / 16 * bytes / 8 / port);
  // Small: the tree's depth, not the number of nodes: from 4 to 64 nodes 4 levels more, up and down, in the first
  // protocol; a ring would take 60 hops more each way.
  CHECK(seconds(64, 64) - seconds(4, 64) == Approx(2 * 4 * h.inter.hop_latency.value).epsilon(0.001));
  // Between: from 100 to 200 MB on 64 nodes trees at 0.92 of the ports' rate still beat the 114 hops more of a ring per
  // rail. Each node sends and takes all of the data twice, an eighth through each port.
  CHECK(seconds(64, 2e8) - seconds(64, 1e8) == Approx(2 * 1e8 / 8 / port / 0.92).epsilon(0.001));
  // Reduce-scatter and all-gather have no trees: their rings pass every node.
  CHECK(m.collective_seconds(OpKind::all_gather, {512, 64, 8}, 64) -
            m.collective_seconds(OpKind::all_gather, {32, 4, 8}, 64) >
        59 * h.inter.hop_latency.value);
  // NVLS is of one node: across nodes the switch's gain changes nothing.
  ClusterSpec sharp = thin;
  sharp.gpu.nvlink_sharp = true;
  CHECK(network_model(sharp).collective_seconds(OpKind::all_reduce, {8, 1, 8}, bytes) <
        m.collective_seconds(OpKind::all_reduce, {8, 1, 8}, bytes));
  CHECK(network_model(sharp).collective_seconds(OpKind::all_reduce, {16, 2, 8}, bytes) == seconds(2, bytes));
}

TEST_CASE("rails: rings stay on theirs, all-to-all passes NVLink to another") {
  const double bytes = 8e9;
  const auto seconds = [&](const ClusterSpec& c, OpKind kind, const GroupShape& g) {
    return network_model(c).collective_seconds(kind, g, bytes);
  };
  using enum NetworkTopology;
  const GroupShape four = GroupShape::strided(32, 1, 8), pair = GroupShape::strided(2, 8, 8);
  REQUIRE(four.aligned);
  REQUIRE(pair.aligned);
  // The same eight switches of 8 nodes' ports: a leaf has one node of eight each, a set of rails all eight nodes. So
  // what four nodes exchange crosses the spine under leaves and stays below it on rails.
  const ClusterSpec leaves = network_of(leaf, 1, 4), rails = network_of(rail_optimized, 8, 4);
  const CostModel full = network_model(network_of());
  for (OpKind kind : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce}) {
    CHECK(seconds(rails, kind, four) == full.collective_seconds(kind, four, bytes));
    CHECK(seconds(leaves, kind, four) > 3 * seconds(rails, kind, four));
  }
  // All-to-all: of what leaves the node an eighth is for its own rail; the rest takes NVLink first, which is nine times
  // as fast as the port, so the port still decides: 24 of 31 parts.
  const double port = full.hardware().inter.bandwidth.value;
  CHECK(seconds(rails, OpKind::all_to_all, four) == Approx(bytes * 24 / 31 / port).epsilon(0.001));
  CHECK(seconds(leaves, OpKind::all_to_all, four) == Approx(4 * bytes * 24 / 31 / port).epsilon(0.001));
  // Without NVLink to speak of the spine is the shorter way; where there is none, NVLink's rate is all there is.
  ClusterSpec slow = rails;
  slow.gpu.nvlink_bandwidth.value = 5e9;
  const CostModel slow_model = network_model(slow);
  CHECK(slow_model.collective_seconds(OpKind::all_to_all, four, bytes) ==
        Approx(bytes * 24 / 31 / port * (1.0 / 8 + 4 * 7.0 / 8)).epsilon(0.01));
  slow.network_topology = rail_only;
  const double inside = network_model(slow).hardware().intra.bandwidth.value;
  CHECK(network_model(slow).collective_seconds(OpKind::all_to_all, four, bytes) ==
        Approx(bytes * (7.0 / 31 + 24.0 / 31 * 7 / 8) / inside).epsilon(0.01));
  // Rails without a spine carry rings as full bisection does, however many nodes.
  const ClusterSpec only = network_of(rail_only, 1, 16);
  CHECK(seconds(only, OpKind::all_gather, GroupShape::strided(512, 1, 8)) ==
        full.collective_seconds(OpKind::all_gather, GroupShape::strided(512, 1, 8), bytes));
  // A pair whose places in their nodes differ is on two rails: one hop over NVLink more.
  const GroupShape crossed = GroupShape::strided(2, 12, 8);
  CHECK_FALSE(crossed.aligned);
  CHECK(seconds(only, OpKind::send, crossed) > seconds(only, OpKind::send, pair));
  CHECK(seconds(network_of(), OpKind::send, crossed) == seconds(network_of(), OpKind::send, pair));
}

TEST_CASE("a group's places in its nodes: from members as from strides") {
  const CostModel m = network_model(network_of());
  const auto shape = [&](std::vector<Rank> members) { return m.shape_of(members); };
  CHECK(shape({0, 8, 16}).aligned);
  CHECK(shape({0, 1, 8, 9}).aligned);
  CHECK(shape({1, 0, 9, 8}).aligned);
  CHECK_FALSE(shape({0, 9}).aligned);
  CHECK_FALSE(shape({0, 1, 8}).aligned);
  CHECK_FALSE(shape({0, 1, 8, 10}).aligned);
  CHECK(shape({2, 5, 7}).aligned);
  for (std::int64_t stride : {1, 2, 4, 8, 16, 24}) {
    std::vector<Rank> members;
    for (Rank r = 0; r < 16; ++r) members.push_back(r * stride);
    INFO(stride);
    CHECK(shape(members).aligned == GroupShape::strided(16, stride, 8).aligned);
  }
  CHECK_FALSE(GroupShape::strided(4, 3, 8).aligned);
}

TEST_CASE(
    "property: rails of the same switches are never slower, nor is more bandwidth or a thinner-fed spine faster") {
  CHECK(rc::check("topologies", [] {
    const auto kind = *rc::gen::element(OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce,
                                        OpKind::all_to_all, OpKind::send, OpKind::broadcast);
    const auto stride = *rc::gen::element<std::int64_t>(1, 2, 4, 8, 16, 64);
    const auto ranks = *rc::gen::element<std::int64_t>(2, 3, 8, 16, 24, 64);
    const GroupShape g = GroupShape::strided(ranks, stride, 8);
    const double bytes = *rc::gen::inRange<std::int64_t>(1, 1'000'000'000);
    const auto pod = *rc::gen::inRange<std::int64_t>(0, 9);
    const double spine = *rc::gen::inRange(1, 9);
    const auto seconds = [&](const ClusterSpec& c) { return network_model(c).collective_seconds(kind, g, bytes); };
    const ClusterSpec leaf = network_of(NetworkTopology::leaf, pod, spine);
    const CostModel reference = network_model(leaf);
    // Eight leaves of `pod` nodes each make rails of 8 x `pod` nodes. What goes to another rail passes one hop more.
    const double hop = kind == OpKind::all_to_all ? 3.4 / 0.47 * reference.hardware().intra.hop_latency.value : 0.0;
    const double rails = seconds(network_of(NetworkTopology::rail_optimized, 8 * pod, spine));
    const double limit = (seconds(leaf) + hop) * (1 + 1e-12);
    RC_ASSERT(rails <= limit);
    RC_ASSERT(seconds(network_of(NetworkTopology::rail_only, pod, spine)) <= limit);
    for (NetworkTopology t : {NetworkTopology::leaf, NetworkTopology::rail_optimized, NetworkTopology::rail_only}) {
      const ClusterSpec base = network_of(t, pod, spine);
      ClusterSpec faster = base, thinner = base;
      faster.network_bandwidth.value *= 2;
      thinner.oversubscription *= 2;
      RC_ASSERT(seconds(faster) <= seconds(base) * (1 + 1e-12));
      RC_ASSERT(seconds(thinner) >= seconds(base) * (1 - 1e-12));
      faster = base;
      faster.gpu.nvlink_bandwidth.value *= 2;
      RC_ASSERT(seconds(faster) <= seconds(base) * (1 + 1e-12));
      RC_ASSERT(network_model(base).collective_seconds(kind, g, 2 * bytes) >= seconds(base));
    }
  }));
}

TEST_CASE("the topology is a key of the cluster") {
  const std::string text =
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, network_topology: rail-only}\n"
      "train: {layout: {dp: 32}}\nrollout: {layout: {dp: 32}}\n";
  const auto s = load_scenario_text(text, "rails.yaml");
  REQUIRE(s.has_value());
  CHECK(s->cluster.network_topology == NetworkTopology::rail_only);
}

TEST_CASE("sends between stages hide behind passes only as far as these take") {
  const auto seconds = [](const char* network) {
    auto s = load_scenario(std::filesystem::path(source_folder) / "scenarios" / "qwen2.5-32b-megatron.yaml",
                           {std::string("cluster.network_gb_per_s=") + network, "train.layout.vpp=8"});
    if (!s) FAIL(render(s.error()));
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    REQUIRE((*pricer)->train().framework().overlap_pipeline);
    const TrainPrice price = (*pricer)->train().price((*pricer)->point().train);
    REQUIRE(price.pipeline_payload > 0);
    return std::pair(price.seconds[static_cast<std::size_t>(Term::pipeline)], price.pipeline_payload);
  };
  const auto [fast, bytes] = seconds("50");
  CHECK(fast < 0.1 * bytes / 5e6);
  const auto [slow, same] = seconds("0.005");
  CHECK(bytes == same);
  CHECK(slow > 0.9 * bytes / 5e6);
}

}  // namespace hotbunk
