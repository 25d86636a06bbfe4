// What copies and collectives take of a cluster's links. The machine: 8 GPUs a node; PCIe 50, NVLink 450 x 0.8 = 360,
// ports 50 x 0.9 = 45, host memory 410 x 0.8 = 328 GB/s (hardware_from_datasheet's stated efficiencies).
#include "sim/cluster_links.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

using namespace hotbunk;

namespace {

ClusterSpec cluster_of(std::int64_t nodes, NetworkTopology topology = NetworkTopology::leaf, std::int64_t pod = 0,
                       double oversubscription = 1.0) {
  ClusterSpec c;
  c.gpu.name = "test-gpu";
  c.gpu.memory_bandwidth = {2e12, "test"};
  c.gpu.flops = {{"bf16", {3e14, "test"}}, {"fp32", {2e13, "test"}}};
  c.gpu.nvlink_bandwidth = {4.5e11, "test"};
  c.gpu.pcie_bandwidth = {5e10, "test"};
  c.host_memory_bandwidth = {4.1e11, "test"};
  c.network_bandwidth = {5e10, "test"};
  c.gpus_per_node = 8;
  c.nodes = nodes;
  c.network_topology = topology;
  c.pod_nodes = pod;
  c.oversubscription = oversubscription;
  return c;
}

struct World {
  explicit World(const ClusterSpec& c)
      : cost(hardware_from_datasheet(c), c), cluster(cost, c, static_cast<Rank>(c.ranks()), links) {}
  CostModel cost;
  SharedLinks links;
  ClusterLinks cluster;
  std::uint32_t jobs = 0;

  std::int64_t price(OpKind kind, const std::vector<Rank>& members, double payload) const {
    return std::llround(1e9 * cost.collective_seconds(kind, cost.shape_of(members), payload));
  }
  /// Joins at 0.
  void collective(OpKind kind, const std::vector<Rank>& members, double payload,
                  std::span<const std::vector<Rank>> alike = {}) {
    std::vector<Demand> demands;
    const std::int64_t ns = price(kind, members, payload);
    cluster.collective(cluster.links_of(members, alike), kind, payload, ns, demands);
    links.join(0, jobs++, ns, demands);
  }
  void copy(Rank rank, CopyDirection direction, double bytes, std::span<const Rank> alike = {}) {
    std::vector<Demand> demands;
    const std::int64_t ns = std::llround(1e9 * cost.host_copy_seconds(bytes));
    cluster.copy(cluster.links_of(rank, alike), direction, bytes, ns, demands);
    links.join(0, jobs++, ns, demands);
  }
  void send(Rank from, Rank to, double bytes) {
    std::vector<Demand> demands;
    const std::int64_t ns = price(OpKind::send, {std::min(from, to), std::max(from, to)}, bytes);
    cluster.send(from, to, bytes, ns, demands);
    links.join(0, jobs++, ns, demands);
  }
  /// When each job is done, in ns.
  std::map<std::uint32_t, std::int64_t> play() {
    std::map<std::uint32_t, std::int64_t> done;
    while (const auto next = links.next_done_ns())
      while (const auto job = links.take_done(*next)) done[*job] = *next;
    return done;
  }
};

std::vector<Rank> range(Rank from, Rank to) {
  std::vector<Rank> out(static_cast<std::size_t>(to - from));
  std::iota(out.begin(), out.end(), from);
  return out;
}

std::vector<Rank> both(std::vector<Rank> a, const std::vector<Rank>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Parts of a link are cut to 2^-40, so that a slowed job may end that much early.
void check_near(std::int64_t ns, double seconds) { CHECK(std::abs(static_cast<double>(ns) - 1e9 * seconds) <= 2.0); }

}  // namespace

TEST_CASE("eight ranks of a node that sleep at once share its host memory") {
  // One copy of 10 GB: 10 us + 10 / 50 s. Eight of them move 80 GB through 328 GB/s: 0.2439 s, each at 0.82 of its
  // rate.
  World one(cluster_of(1)), eight(cluster_of(1)), folded(cluster_of(1)), two_nodes(cluster_of(2));
  one.copy(0, CopyDirection::to_host, 10e9);
  CHECK(one.play().at(0) == 200'010'000);
  const std::vector<Rank> all = range(0, 8);
  for (Rank r : all) eight.copy(r, CopyDirection::to_host, 10e9);
  const auto done = eight.play();
  for (const auto& [job, ns] : done) check_near(ns, 80e9 / 328e9);
  // What the closed form says of a node that copies.
  check_near(done.at(0), eight.cost.node_copy_seconds(10e9));
  // One rank that stands for all of its node.
  folded.copy(3, CopyDirection::to_host, 10e9, all);
  CHECK(folded.play().at(0) == done.at(0));
  // Six want 60 / 328 s within 0.20001 s and are not slowed; and each node has memory of its own.
  for (Rank r : {0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}) two_nodes.copy(r, CopyDirection::to_host, 10e9);
  for (const auto& [job, ns] : two_nodes.play()) CHECK(ns == 200'010'000);
}

TEST_CASE("ranks share the memory of their NUMA domain, not that of the whole node") {
  // Two domains of 164 GB/s, near devices 0-3 and 4-7. Four of 10 GB in one: 40 / 164 s; two in each: 20 / 164 s are
  // less than the 0.20001 s that each takes alone; all eight: as long as through one memory of 328.
  ClusterSpec c = cluster_of(1);
  c.numa_domains = {2, "test"};
  World near(c), spread(c), all(c), folded(c), more(c);
  for (Rank r : range(4, 8)) near.copy(r, CopyDirection::to_host, 10e9);
  for (const auto& [job, ns] : near.play()) check_near(ns, 40e9 / 164e9);
  for (Rank r : {0, 1, 6, 7}) spread.copy(r, CopyDirection::to_host, 10e9);
  for (const auto& [job, ns] : spread.play()) CHECK(ns == 200'010'000);
  for (Rank r : range(0, 8)) all.copy(r, CopyDirection::to_host, 10e9);
  for (const auto& [job, ns] : all.play()) check_near(ns, 80e9 / 328e9);
  const std::vector<Rank> alike = range(0, 8);
  folded.copy(3, CopyDirection::to_host, 10e9, alike);
  check_near(folded.play().at(0), 80e9 / 328e9);
  // Up and down meet in the memory: five copies of 10 GB in the domain of ranks 0 to 3, one in the other.
  for (Rank r : range(0, 4)) more.copy(r, CopyDirection::to_host, 10e9);
  more.copy(0, CopyDirection::to_device, 10e9);
  more.copy(7, CopyDirection::to_device, 10e9);
  const auto done = more.play();
  for (std::uint32_t job = 0; job < 5; ++job) check_near(done.at(job), 50e9 / 164e9);
  CHECK(done.at(5) == 200'010'000);
  const auto rows = all.cluster.traffic(alike);
  const auto memory = std::ranges::find(rows, "host memory", &LinkTraffic::kind);
  REQUIRE(memory != rows.end());
  CHECK(memory->name == "node 0 numa 0 host memory");
  CHECK(memory->links == 2);
  CHECK(memory->bytes == Approx(40e9));
  CHECK(memory->capacity_bytes_per_s == Approx(164e9));
  // Six domains do not divide eight devices evenly, four do: two copies in one of 82 GB/s, one in another.
  c.numa_domains = {6, "test"};
  World quarters(c);
  for (Rank r : {0, 1, 2}) quarters.copy(r, CopyDirection::to_host, 10e9);
  const auto ends = quarters.play();
  for (std::uint32_t job = 0; job < 2; ++job) check_near(ends.at(job), 20e9 / 82e9);
  CHECK(ends.at(2) == 200'010'000);
}

TEST_CASE("a price that assumes that the node's other ranks copy is not slowed by them") {
  const std::int64_t domains = GENERATE(1, 2, 8);
  ClusterSpec c = cluster_of(1);
  c.numa_domains = {static_cast<double>(domains), "test"};
  World world(c);
  const std::int64_t ns = std::llround(1e9 * world.cost.node_copy_seconds(10e9));
  CHECK(ns > 240'000'000);
  std::vector<Demand> demands;
  for (Rank r : range(0, 8)) {
    demands.clear();
    world.cluster.copy(world.cluster.links_of(r), CopyDirection::to_device, 10e9, ns, demands);
    world.links.join(0, static_cast<std::uint32_t>(r), ns, demands);
  }
  for (const auto& [job, time] : world.play()) CHECK(time == ns);
}

TEST_CASE("a device's two directions are two links, and ranks on one device share them") {
  // 1 GB each way: nobody waits. A second one to the host halves both: 2 GB at 50 GB/s.
  World world(cluster_of(1));
  world.copy(0, CopyDirection::to_host, 1e9);
  world.copy(0, CopyDirection::to_device, 1e9);
  world.copy(0, CopyDirection::to_host, 1e9);
  const auto done = world.play();
  CHECK(done.at(1) == 20'010'000);
  check_near(done.at(0), 2e9 / 50e9);
  // With two ranks on a device a copy is priced at half the link, 10 us + 1 / 25 s: the two of them fit; three move 3
  // GB.
  ClusterSpec shared = cluster_of(1);
  shared.ranks_per_device = 2;
  World pair(shared), three(shared);
  for (Rank r : {0, 1}) pair.copy(r, CopyDirection::to_host, 1e9);
  for (const auto& [job, ns] : pair.play()) CHECK(ns == 40'010'000);
  for (Rank r : {0, 1, 0}) three.copy(r, CopyDirection::to_host, 1e9);
  for (const auto& [job, ns] : three.play()) check_near(ns, 3e9 / 50e9);
  // Rates that were measured while both worked are a rank's own: 10 us + 1 / 50 s, and again the two of them fit.
  Hardware measured = hardware_from_datasheet(shared);
  measured.measured_ranks_per_device = 2;
  const CostModel cost(measured, shared);
  SharedLinks links;
  const ClusterLinks cluster(cost, shared, 16, links);
  for (Rank r : {0, 1}) {
    std::vector<Demand> demands;
    cluster.copy(cluster.links_of(r), CopyDirection::to_host, 1e9, 20'010'000, demands);
    links.join(0, static_cast<std::uint32_t>(r), 20'010'000, demands);
  }
  CHECK(links.next_done_ns() == 20'010'000);
}

TEST_CASE("two collectives on one network port share it") {
  // An all-gather of 9 GB over ranks 0 and 8 puts 4.5 GB on the port: 0.1 s at 45 GB/s, and latencies beside. Two of
  // them: 9 GB, 0.2 s. A third over ranks 1 and 9 has ports of its own.
  World world(cluster_of(2));
  const std::vector<Rank> pair = {0, 8}, other = {1, 9};
  const std::int64_t alone = world.price(OpKind::all_gather, pair, 9e9);
  CHECK(alone > 100'000'000);
  CHECK(alone < 100'100'000);
  world.collective(OpKind::all_gather, pair, 9e9);
  world.collective(OpKind::all_gather, pair, 9e9);
  world.collective(OpKind::all_gather, other, 9e9);
  const auto done = world.play();
  check_near(done.at(0), 0.2);
  check_near(done.at(1), 0.2);
  CHECK(done.at(2) == alone);
}

TEST_CASE("two collectives on one NVLink share it, and leave the ports alone") {
  // 8 GB gathered over 8 ranks: 7 GB into each, 7 / 360 s; two at once take 14 / 360 s.
  World world(cluster_of(1));
  for (int i = 0; i < 2; ++i) world.collective(OpKind::all_gather, range(0, 8), 8e9);
  for (const auto& [job, ns] : world.play()) check_near(ns, 14e9 / 360e9);
}

TEST_CASE("two-level all-reduces over an oversubscribed spine") {
  // Two nodes, a leaf switch each, spine 4 : 1: the 8 ports of 45 GB/s have 90 GB/s of it. Group A is the first four
  // GPUs of both nodes, B the others. An all-reduce of 36 GB reduces in each node, then each of 4 ports sends
  // 2 (2-1)/2 x 36 / 4 = 9 GB, 0.2 s; the price takes the spine's quarter of it: 0.8 s and latencies. Node 0 sends
  // 36 GB, half of what the spine can carry in that time: A and B together are not slowed.
  const ClusterSpec c = cluster_of(2, NetworkTopology::leaf, 1, 4.0);
  const std::vector<Rank> a = both(range(0, 4), range(8, 12)), b = both(range(4, 8), range(12, 16));
  World two(c);
  const std::int64_t alone = two.price(OpKind::all_reduce, a, 36e9);
  CHECK(alone > 800'000'000);
  CHECK(alone < 800'100'000);
  two.collective(OpKind::all_reduce, a, 36e9);
  two.collective(OpKind::all_reduce, b, 36e9);
  for (const auto& [job, ns] : two.play()) CHECK(ns == alone);
  // A once more: 3 x 36 GB through 90 GB/s, 1.2 s; the ports of A, at half their rate, are not what is short.
  World three(c);
  for (const auto& group : {a, b, a}) three.collective(OpKind::all_reduce, group, 36e9);
  for (const auto& [job, ns] : three.play()) check_near(ns, 3 * 36.0 / 90);
  // The same under full bisection: A's two share their ports, 2 x 9 GB; B is alone.
  World full(cluster_of(2));
  for (const auto& group : {a, b, a}) full.collective(OpKind::all_reduce, group, 36e9);
  const auto done = full.play();
  check_near(done.at(0), 18.0 / 45);
  CHECK(done.at(1) == full.price(OpKind::all_reduce, b, 36e9));
  // A and B are alike: one stands for both.
  World folded(c);
  const std::vector<std::vector<Rank>> alike = {a, b};
  for (int i = 0; i < 2; ++i) folded.collective(OpKind::all_reduce, a, 36e9, alike);
  for (const auto& [job, ns] : folded.play()) check_near(ns, 4 * 36.0 / 90);
}

TEST_CASE("of a ring only the last node of a pod sends through its spine; of an all-to-all every rank does") {
  // Two pods of four nodes, spine 4 : 1. All 64 ranks gather 6.4 GB: each port carries 63/64 x 6.4 / 8 = 0.7875 GB,
  // 17.5 ms; priced at four times that. Eight ports' worth of 32 that share 1/4 of their rate: a quarter of the price.
  const ClusterSpec c = cluster_of(8, NetworkTopology::leaf, 4, 4.0);
  const auto spine_part = [&](OpKind kind, double payload) {
    World world(c);
    std::vector<Demand> demands;
    const std::vector<Rank> all = range(0, 64);
    world.cluster.collective(world.cluster.links_of(all), kind, payload, world.price(kind, all, payload), demands);
    double part = 0;
    for (const Demand& d : demands)
      if (world.links.name(d.link) == "pod 0 spine up") part += d.fraction;
    return part;
  };
  CHECK(spine_part(OpKind::all_gather, 6.4e9) == Approx(0.25).epsilon(0.01));
  // Of what an all-to-all sends to other nodes, to 56 ranks, 32 are in the other pod.
  CHECK(spine_part(OpKind::all_to_all, 6.4e9) == Approx(32.0 / 56).epsilon(0.01));
}

TEST_CASE("rails: a ring stays on its own, and each has a spine of its own") {
  using enum NetworkTopology;
  // Pods of one node, 4 : 1: rank 0's ring and rank 1's take different spines, and each is full (0.25 of a port's
  // rate).
  const ClusterSpec c = cluster_of(2, rail_optimized, 1, 4.0);
  World world(c);
  for (const std::vector<Rank>& ring : {std::vector<Rank>{0, 8}, {1, 9}})
    world.collective(OpKind::all_gather, ring, 9e9);
  const std::int64_t alone = world.price(OpKind::all_gather, {0, 8}, 9e9);
  for (const auto& [job, ns] : world.play()) CHECK(ns == alone);
  World same(c);
  for (int i = 0; i < 2; ++i) same.collective(OpKind::all_gather, {0, 8}, 9e9);
  for (const auto& [job, ns] : same.play()) check_near(ns, 2 * 0.1 * 4);
  // Both nodes in one pod: rails do not need the spine.
  World below(cluster_of(2, rail_optimized, 2, 4.0));
  std::vector<Demand> demands;
  below.cluster.collective(below.cluster.links_of({0, 8}), OpKind::all_gather, 9e9, 1'000'000'000, demands);
  for (const Demand& d : demands) CHECK(below.links.name(d.link).find("spine") == std::string::npos);
  CHECK(demands.size() == 4);  // two ports, in and out
}

TEST_CASE("sends: out of one, into the other; the two directions pass each other") {
  World world(cluster_of(2));
  world.send(0, 8, 4.5e9);  // 0.1 s at 45 GB/s
  world.send(8, 0, 4.5e9);
  const std::int64_t alone = world.price(OpKind::send, {0, 8}, 4.5e9);
  for (const auto& [job, ns] : world.play()) CHECK(ns == alone);
  World meeting(cluster_of(2));
  meeting.send(0, 8, 4.5e9);
  meeting.send(1, 8, 4.5e9);  // both into rank 8's port
  for (const auto& [job, ns] : meeting.play()) check_near(ns, 0.2);
  World inside(cluster_of(1));
  inside.send(0, 1, 3.6e9);
  inside.send(0, 2, 3.6e9);  // both out of rank 0's NVLink: 7.2 GB at 360 GB/s
  for (const auto& [job, ns] : inside.play()) check_near(ns, 0.02);
}

TEST_CASE("without NVLink what stays in a node and copies share PCIe") {
  // 50 GB/s of PCIe, 40 of it for collectives. A send of 4 GB: 0.1 s and latencies, 0.8 of the link; a copy of 5 GB to
  // the host on the same way out: 0.1 s. Both at rate r: r (0.8 + 1.0) = 1; 9 GB through 50 GB/s: the send is done at
  // 0.18 s, and the copy then too, but for the latencies.
  ClusterSpec c = cluster_of(1);
  c.gpu.nvlink_bandwidth = {};
  World world(c);
  world.send(0, 1, 4e9);
  world.copy(0, CopyDirection::to_host, 5e9);
  for (const auto& [job, ns] : world.play()) CHECK(std::abs(static_cast<double>(ns) - 0.18e9) < 1e5);
}

TEST_CASE("through host memory all collectives of a node share its bus") {
  ClusterSpec c = cluster_of(1);
  c.gpu.is_cpu = true;
  World world(c);
  REQUIRE(world.cost.hardware().shared_transport);
  const double bus = world.cost.hardware().intra.bandwidth.value;
  // Pairs 0,1 and 2,3 gather 2 GB each: 1 GB into each rank, 2 GB over the bus per pair.
  for (const std::vector<Rank>& pair : {std::vector<Rank>{0, 1}, {2, 3}})
    world.collective(OpKind::all_gather, pair, 2e9);
  for (const auto& [job, ns] : world.play()) check_near(ns, 4e9 / bus);
}

TEST_CASE("property: no collective, copy or send is slowed by itself") {
  CHECK(rc::check("alone", [] {
    ClusterSpec c = cluster_of(*rc::gen::inRange<std::int64_t>(1, 9),
                               *rc::gen::arbitrary<bool>()   ? NetworkTopology::leaf
                               : *rc::gen::arbitrary<bool>() ? NetworkTopology::rail_optimized
                                                             : NetworkTopology::rail_only,
                               *rc::gen::inRange<std::int64_t>(0, 5), *rc::gen::inRange(1, 9));
    c.ranks_per_device = *rc::gen::inRange<std::int64_t>(1, 3);
    if (*rc::gen::inRange(0, 4) == 0) c.gpu.nvlink_bandwidth = {};
    World world(c);
    std::vector<Rank> members;
    for (Rank r = 0; r < c.ranks(); ++r)
      if (*rc::gen::inRange(0, 3) != 0) members.push_back(r);
    if (members.size() < 2) members = range(0, 8);
    const OpKind kind = *rc::gen::element(OpKind::all_gather, OpKind::all_reduce, OpKind::reduce_scatter,
                                          OpKind::all_to_all, OpKind::broadcast, OpKind::peer_copy);
    const double payload = std::pow(10.0, *rc::gen::inRange(0, 11));
    // A calibrated profile may price it below what the datasheet's rates allow.
    const std::int64_t ns = world.price(kind, members, payload) / *rc::gen::inRange(1, 3) + 1;
    std::vector<Demand> demands;
    world.cluster.collective(world.cluster.links_of(members), kind, payload, ns, demands);
    world.links.join(0, 0, ns, demands);
    RC_ASSERT(world.links.next_done_ns() == ns);
    RC_ASSERT(world.links.take_done(ns) == std::uint32_t{0});
    demands.clear();
    world.cluster.send(members.front(), members.back(), payload, ns, demands);
    world.cluster.copy(world.cluster.links_of(members.front()), CopyDirection::to_host, payload, 2 * ns, demands);
    std::map<LinkId, double> taken;
    for (const Demand& d : demands) taken[d.link] += d.fraction * d.times;
    for (const auto& [link, fraction] : taken) RC_ASSERT(fraction <= 2.0);  // a send and a copy may meet on one PCIe
  }));
}
