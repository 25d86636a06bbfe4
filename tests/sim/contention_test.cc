// What several do at the same time over the same links, played by the engine: each against its derived value.
#include <catch2/catch.hpp>
#include <cmath>

#include "sim/model_cost.h"
#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

/// `nodes` of 8 GPUs: NVLink 450 GB/s, PCIe 50 GB/s, a port of 50 GB/s per GPU.
ClusterSpec contended_cluster(std::int64_t nodes) {
  ClusterSpec c;
  c.nodes = nodes;
  c.gpus_per_node = 8;
  c.gpu.name = "test-gpu";
  c.gpu.nvlink_bandwidth = {4.5e11, "test"};
  c.gpu.pcie_bandwidth = {5e10, "test"};
  c.network_bandwidth = {5e10, "test"};
  return c;
}

constexpr std::int64_t gigabyte_elements = 250'000'000;  // float32

Op copy_out(std::int64_t gigabytes) {
  Op copy = op(OpKind::copy, streams::d2h, "sleep");
  copy.inputs = copy.outputs = {tensor(0, {gigabytes * gigabyte_elements})};
  return copy;
}

/// Alone each costs the model's price, on links as the model's hardware has them.
Result<Trace> play(Plan& plan, const CostModel& model, const ClusterSpec& cluster, bool shared = true) {
  const ModelCost cost(model);
  SimOptions options;
  if (shared) options.links = &model;
  return simulate(plan, cost, 1, 1, options, cluster);
}

std::int64_t longest(const Trace& trace, const std::string& name) {
  std::int64_t out = 0;
  for (const auto& [start, end] : times(trace, name)) out = std::max(out, end - start);
  return out;
}

}  // namespace

TEST_CASE("contention: eight ranks that sleep at once share their node's memory") {
  // 10 GB each. One alone: its PCIe's price. Eight: 80 GB through the node's memory, where that is narrower.
  const ClusterSpec cluster = contended_cluster(1);
  Hardware hardware = hardware_from_datasheet(cluster);
  hardware.host_memory_bandwidth = {2e11, "test"};
  const CostModel model(hardware, cluster);
  std::vector<std::vector<Op>> one(8), eight(8, {copy_out(10)});
  one[3] = {copy_out(10)};
  Plan alone = plan_of(std::move(one)), all = plan_of(std::move(eight));
  const std::int64_t price = longest(*play(alone, model, cluster), "sleep");
  CHECK(price == std::llround(1e9 * model.host_copy_seconds(1e10)));
  CHECK(longest(*play(all, model, cluster, false), "sleep") == price);  // links that nobody shares
  const double together = static_cast<double>(longest(*play(all, model, cluster), "sleep"));
  CHECK(together == Approx(1e9 * 80e9 / 2e11).epsilon(1e-3));
  CHECK(together > 1.4 * static_cast<double>(price));
}

TEST_CASE("contention: two collectives on one NIC take twice as long as one") {
  // Two families of the same pair of ranks, on two nodes: an all-reduce of 9 GB on each of two streams.
  const ClusterSpec cluster = contended_cluster(2);
  const CostModel model(hardware_from_datasheet(cluster), cluster);
  const auto plan_with = [&](bool both) {
    std::vector<std::vector<Op>> programs(16);
    for (const std::size_t r : {0, 8}) {
      Op first = all_reduce("first", {9 * gigabyte_elements}, 1, streams::gather);
      Op second = all_reduce("second", {9 * gigabyte_elements}, 2, streams::reduce);
      programs[r] = {first};
      if (both) programs[r].push_back(second);
    }
    Plan plan = plan_of(std::move(programs));
    plan.groups.push_back({"a", {{0, 8}}});
    plan.groups.push_back({"b", {{0, 8}}});
    return plan;
  };
  Plan one = plan_with(false), two = plan_with(true);
  const std::int64_t alone = longest(*play(one, model, cluster), "first");
  CHECK(alone == std::llround(1e9 * model.collective_seconds(OpKind::all_reduce, model.shape_of({0, 8}), 9e9)));
  const auto trace = play(two, model, cluster);
  // What moves takes twice as long; start-up and steps, well under a percent here, do not.
  CHECK(static_cast<double>(longest(*trace, "first")) == Approx(2.0 * static_cast<double>(alone)).epsilon(0.01));
  CHECK(longest(*trace, "second") == longest(*trace, "first"));
}

TEST_CASE("contention: two-level all-reduces over an oversubscribed spine share it") {
  // Four nodes, each a pod of its own, the spine 4 times narrower than the ports below it: what leaves a node is priced
  // as if all eight ports sent. Eight rings of one GPU per node, all at once, are then as long as one of them; without
  // company a single ring has the spine to itself, and its price is that of a port.
  ClusterSpec cluster = contended_cluster(4);
  cluster.pod_nodes = 1;
  cluster.oversubscription = 4.0;
  const CostModel model(hardware_from_datasheet(cluster), cluster);
  const auto plan_with = [&](std::size_t rings) {
    std::vector<std::vector<Op>> programs(32);
    GroupFamily family{"across", {}};
    for (Rank place = 0; place < 8; ++place) {
      std::vector<Rank> members;
      for (Rank node = 0; node < 4; ++node) members.push_back(8 * node + place);
      for (const Rank r : members)
        if (static_cast<std::size_t>(place) < rings)
          programs[static_cast<std::size_t>(r)] = {all_reduce("ring", {9 * gigabyte_elements}, 1, streams::reduce)};
      family.groups.push_back(std::move(members));
    }
    Plan plan = plan_of(std::move(programs));
    plan.groups.push_back(std::move(family));
    return plan;
  };
  Plan one = plan_with(1), all = plan_with(8);
  const std::int64_t priced =
      std::llround(1e9 * model.collective_seconds(OpKind::all_reduce, model.shape_of({0, 8, 16, 24}), 9e9));
  CHECK(longest(*play(one, model, cluster), "ring") == priced);
  CHECK(longest(*play(all, model, cluster), "ring") == priced);  // the price has the company in it: not twice
}

TEST_CASE("contention: times that scatter do so in a simulation, and ranks no longer alike are not folded") {
  const ClusterSpec cluster = contended_cluster(1);
  DisturbanceSpec d;
  d.jitter = {.relative = 0.3, .seed = 5};
  const Prices prices{{"kernel", 1000}};
  const DisturbedCost cost(prices, d, cluster);
  Plan plan = plan_of(std::vector<std::vector<Op>>(8, {kernel("kernel"), all_reduce("reduce", {8})}));
  plan.program_of_rank.assign(8, 0);
  const std::vector<std::int32_t> same(8, 0);
  CHECK(RankClasses::fold(plan, prices, same).players().size() < 8);
  CHECK(RankClasses::fold(plan, cost, same).players().size() == 8);
  const auto first = simulate(plan, cost, 1, 1, {}, cluster), again = simulate(plan, cost, 1, 1, {}, cluster);
  std::set<std::int64_t> ends;
  for (const auto& [start, end] : times(*first, "kernel")) ends.insert(end);
  CHECK(ends.size() == 8);
  CHECK(times(*first, "kernel") == times(*again, "kernel"));
}

TEST_CASE("links: what they carried is what ranks sent, and how long they were full is derived") {
  // One node: all-gathers of eight ranks over NVLink. Each rank's link out carries what the rank puts on the wire.
  const ClusterSpec cluster = contended_cluster(1);
  const CostModel model(hardware_from_datasheet(cluster), cluster);
  std::vector<std::vector<Op>> programs(8);
  for (auto& program : programs) {
    Op gather = all_reduce("gather", {9 * gigabyte_elements}, 1, streams::gather);
    gather.kind = OpKind::all_gather;
    program = {gather, copy_out(10)};
  }
  Plan plan = plan_of(std::move(programs));
  plan.groups.push_back({"node", {{0, 1, 2, 3, 4, 5, 6, 7}}});
  const auto trace = play(plan, model, cluster);
  REQUIRE(trace);
  const auto of = [&](const std::string& kind) {
    std::vector<LinkTraffic> out;
    for (const LinkTraffic& l : trace->links)
      if (l.kind == kind) out.push_back(l);
    return out;
  };
  const auto out = of("nvlink out");
  REQUIRE(out.size() == 1);
  CHECK(out[0].links == 8);
  std::int64_t wire = 0;
  for (const auto& [key, count] : trace->traffic_totals[0]) wire += count.wire_bytes;
  CHECK(wire > 0);
  CHECK(out[0].bytes == Approx(static_cast<double>(wire)).epsilon(1e-9));
  // Its bytes at full rate, and no longer busy than the collective.
  CHECK(out[0].full_ns == Approx(1e9 * out[0].bytes / out[0].capacity_bytes_per_s).epsilon(1e-6));
  CHECK(out[0].busy_ns == longest(*trace, "gather"));
  CHECK(out[0].peak == Approx(out[0].full_ns / static_cast<double>(out[0].busy_ns)).epsilon(1e-6));
  // Eight copies of 10 GB meet in the node's memory, which is as full as they make it: 80 GB in all.
  const auto memory = of("host memory");
  REQUIRE(memory.size() == 1);
  CHECK(memory[0].bytes == Approx(80e9));
  CHECK(memory[0].busy_ns == longest(*trace, "sleep"));
  CHECK(of("pcie to host")[0].bytes == Approx(10e9));
  CHECK(of("pcie to device").empty());
  CHECK(of("port out").empty());
}
