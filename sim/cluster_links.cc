#include "sim/cluster_links.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

/// Of a link that is busy for so long at full rate, by a job that takes `price_ns` alone: half a nanosecond more, as
/// prices are rounded, and rounding makes no contention.
double fraction_of(double seconds, std::int64_t price_ns) {
  if (seconds <= 0.0) return 0.0;
  return std::min(1.0, seconds * 1e9 / (static_cast<double>(price_ns) + 0.5));
}

constexpr const char* device_link_names[] = {"pcie to device", "pcie to host", "nvlink in",
                                             "nvlink out",     "port in",      "port out"};
constexpr const char* spine_names[] = {"spine down", "spine up"};

/// All-to-all: every member sends to every other. A ring's nodes send to the next one.
bool spreads(OpKind k) { return k == OpKind::all_to_all || k == OpKind::peer_copy; }

}  // namespace

ClusterLinks::ClusterLinks(const CostModel& cost, const ClusterSpec& cluster, Rank num_ranks, SharedLinks& links,
                           std::span<const RankFactors> slow)
    : cost_(cost),
      links_(links),
      ranks_per_device_(std::max<std::int64_t>(1, cluster.ranks_per_device)),
      devices_per_node_(std::max<std::int64_t>(1, cluster.gpus_per_node)),
      numa_domains_(cluster.even_numa_domains()),
      pod_nodes_(std::max<std::int64_t>(1, cluster.pod_nodes)),
      rails_(cluster.network_topology == NetworkTopology::rail_optimized),
      has_spine_(cluster.network_topology != NetworkTopology::rail_only),
      has_nvlink_(cluster.gpu.nvlink_bandwidth.value > 0.0),
      has_bus_(cost.hardware().shared_transport),
      oversubscription_(std::max(1.0, cluster.oversubscription)) {
  HB_CHECK(num_ranks > 0, "a cluster of {} ranks", num_ranks);
  const std::int64_t nodes = node_of(num_ranks - 1) + 1;
  if (!slow.empty()) slow_.resize(static_cast<std::size_t>(nodes * devices_per_node_));
  for (std::size_t r = 0; r < slow.size() && r < static_cast<std::size_t>(num_ranks); ++r) {
    RankFactors& device = slow_[static_cast<std::size_t>(device_of(static_cast<Rank>(r)))];
    for (double RankFactors::*kind : {&RankFactors::network, &RankFactors::nvlink, &RankFactors::pcie})
      device.*kind = std::max(device.*kind, slow[r].*kind);
  }
  static_assert(std::size(device_link_names) == num_device_links);
  num_nodes_ = nodes, num_devices_ = nodes * devices_per_node_;
  first_device_ = static_cast<LinkId>(links.num_links());
  for (std::int64_t device = 0; device < nodes * devices_per_node_; ++device)
    for (const char* name : device_link_names)
      links.add_link(fmt::format("node {} gpu {} {}", device / devices_per_node_, device % devices_per_node_, name));
  first_memory_ = static_cast<LinkId>(links.num_links());
  for (std::int64_t domain = 0; domain < nodes * numa_domains_; ++domain)
    links.add_link(numa_domains_ == 1
                       ? fmt::format("node {} host memory", domain)
                       : fmt::format("node {} numa {} host memory", domain / numa_domains_, domain % numa_domains_));
  first_bus_ = static_cast<LinkId>(links.num_links());
  if (has_bus_)
    for (std::int64_t node = 0; node < nodes; ++node) links.add_link(fmt::format("node {} bus", node));
  first_spine_ = static_cast<LinkId>(links.num_links());
  const std::int64_t pods = has_spine_ && nodes > 1 ? (nodes + pod_nodes_ - 1) / pod_nodes_ : 0;
  num_spines_ = pods * (rails_ ? devices_per_node_ : 1);
  for (std::int64_t pod = 0; pod < pods; ++pod)
    for (std::int64_t rail = 0; rail < (rails_ ? devices_per_node_ : 1); ++rail)
      for (const char* name : spine_names)
        links.add_link(fmt::format("pod {}{} {}", pod, rails_ ? fmt::format(" rail {}", rail) : "", name));
}

double ClusterLinks::spine_bytes_per_s() const {
  return cost_.hardware().inter.bandwidth.value * static_cast<double>(pod_nodes_ * (rails_ ? 1 : devices_per_node_)) /
         oversubscription_;
}

double ClusterLinks::slowness(std::int64_t device, DeviceLink link) const {
  if (slow_.empty()) return 1.0;
  const RankFactors& slow = slow_[static_cast<std::size_t>(device)];
  return link <= pcie_out ? slow.pcie : link <= nvlink_out ? slow.nvlink : slow.network;
}

std::vector<LinkTraffic> ClusterLinks::traffic(std::span<const Rank> player_of) const {
  // How many devices, NUMA domains, nodes and spine links each one that is played stands for.
  std::map<std::int64_t, std::int64_t> devices, domains, nodes, spines;
  std::set<std::int64_t> seen, near;
  const auto ranks = static_cast<Rank>(player_of.size());
  for (Rank r = 0; r < ranks; ++r) {
    const Rank player = player_of[static_cast<std::size_t>(r)];
    if (r % ranks_per_device_ == 0) ++devices[device_of(player)];
    if (near.insert(domain_of(r)).second) ++domains[domain_of(player)];
    if (r % (ranks_per_device_ * devices_per_node_) == 0) ++nodes[node_of(player)];
    if (num_spines_ > 0 && seen.insert(spine_of(r)).second) ++spines[spine_of(player)];
  }
  const Hardware& h = cost_.hardware();
  std::vector<LinkTraffic> out;
  const auto add = [&](LinkId link, std::string kind, std::int64_t alike, double capacity) {
    const LinkLoad& load = links_.load(link);
    if (load.full_ns <= 0.0) return;
    LinkTraffic row{links_.name(link), std::move(kind), alike,        capacity,
                    load.bytes,        load.busy_ns,    load.full_ns, load.peak};
    const auto same = std::ranges::find_if(out, [&](LinkTraffic other) {
      other.name = row.name, other.links = row.links;
      return other == row;
    });
    if (same == out.end()) out.push_back(std::move(row));
    else same->links += alike;
  };
  for (const auto& [device, alike] : devices)
    for (int l = 0; l < num_device_links; ++l) {
      const auto link = static_cast<DeviceLink>(l);
      const double capacity = (link <= pcie_out     ? h.host_bandwidth
                               : link <= nvlink_out ? h.intra.bandwidth
                                                    : h.inter.bandwidth)
                                  .value;
      add(device_link(device, link), device_link_names[l], alike, capacity / slowness(device, link));
    }
  for (const auto& [domain, alike] : domains)
    add(first_memory_ + static_cast<LinkId>(domain), "host memory", alike, domain_bytes_per_s());
  for (const auto& [node, alike] : nodes) {
    if (has_bus_) add(first_bus_ + static_cast<LinkId>(node), "bus", alike, h.intra.bandwidth.value);
  }
  for (const auto& [spine, alike] : spines)
    for (const bool up : {false, true}) add(spine_link(spine, up), spine_names[up ? 1 : 0], alike, spine_bytes_per_s());
  std::ranges::stable_sort(out, [](const LinkTraffic& a, const LinkTraffic& b) { return a.full_ns > b.full_ns; });
  return out;
}

std::int64_t ClusterLinks::spine_of(Rank r) const {
  const std::int64_t pod = node_of(r) / pod_nodes_;
  return rails_ ? pod * devices_per_node_ + device_of(r) % devices_per_node_ : pod;
}

ClusterLinks::RankLinks ClusterLinks::links_of(Rank rank, std::span<const Rank> alike) const {
  RankLinks out{rank};
  if (alike.empty()) return out;
  out.on_device =
      static_cast<std::int32_t>(std::ranges::count_if(alike, [&](Rank r) { return device_of(r) == device_of(rank); }));
  out.on_domain =
      static_cast<std::int32_t>(std::ranges::count_if(alike, [&](Rank r) { return domain_of(r) == domain_of(rank); }));
  return out;
}

ClusterLinks::GroupLinks ClusterLinks::links_of(const std::vector<Rank>& members,
                                                std::span<const std::vector<Rank>> alike) const {
  GroupLinks out{cost_.shape_of(members), {}, {}, {}};
  std::map<std::int64_t, std::int32_t> devices, nodes, pods;  // members on each
  for (Rank r : members) ++devices[device_of(r)], ++nodes[node_of(r)], ++pods[node_of(r) / pod_nodes_];
  std::map<std::int64_t, std::int32_t> on_device, on_node, on_spine;  // groups on each
  for (const std::vector<Rank>& group : alike) {
    std::set<std::int64_t> d, n, s;
    for (Rank r : group) d.insert(device_of(r)), n.insert(node_of(r)), s.insert(spine_of(r));
    for (std::int64_t x : d) ++on_device[x];
    for (std::int64_t x : n) ++on_node[x];
    for (std::int64_t x : s) ++on_spine[x];
  }
  const auto times = [](const auto& groups, std::int64_t x) {
    const auto at = groups.find(x);
    return at == groups.end() ? 1 : at->second;
  };
  for (const auto& [device, count] : devices) out.devices.push_back({device, count, times(on_device, device)});
  for (const auto& [node, count] : nodes) out.nodes.push_back({node, times(on_node, node)});
  if (!has_spine_ || nodes.size() <= 1) return out;
  // The spine feeds `ports` ports below each of its links; a member's second on its port is so much on that link.
  const double ports = static_cast<double>(pod_nodes_ * (rails_ ? 1 : devices_per_node_));
  const double per_port = oversubscription_ / ports;
  const auto ranks = static_cast<double>(members.size());
  std::map<std::int64_t, GroupLinks::Spine> spines;
  for (Rank r : members) {
    GroupLinks::Spine& spine = spines.try_emplace(spine_of(r), GroupLinks::Spine{spine_of(r)}).first->second;
    spine.all += per_port;
    const double outside = ranks - pods[node_of(r) / pod_nodes_], away = ranks - nodes[node_of(r)];
    spine.spread += per_port * outside / away;
  }
  for (auto& [link, spine] : spines) {
    // A ring enters and leaves a pod at one node each, over its members' ports there.
    const double boundary = rails_ ? 1.0 : static_cast<double>(out.shape.per_node);
    if (pods.size() > 1) spine.ring = std::min(spine.all, boundary * per_port);
    spine.times = times(on_spine, link);
    out.spines.push_back(spine);
  }
  return out;
}

double ClusterLinks::part(std::int64_t device, double RankFactors::*kind, double seconds, std::int64_t price_ns) const {
  const double by = slow_.empty() ? 1.0 : slow_[static_cast<std::size_t>(device)].*kind;
  return fraction_of(seconds * by, price_ns);
}

Demand ClusterLinks::inside(std::int64_t device, bool out, double fraction, std::int32_t times, double bytes) const {
  if (has_nvlink_) return {device_link(device, out ? nvlink_out : nvlink_in), fraction, times, bytes};
  const Hardware& h = cost_.hardware();
  const double of_pcie = h.intra.bandwidth.value / std::max(h.host_bandwidth.value, 1.0);
  return {device_link(device, out ? pcie_out : pcie_in), std::min(1.0, fraction * of_pcie), times, bytes};
}

void ClusterLinks::copy(const RankLinks& at, CopyDirection direction, double bytes, std::int64_t price_ns,
                        std::vector<Demand>& out) const {
  if (bytes <= 0.0) return;
  const Hardware& h = cost_.hardware();
  const double device =
      part(device_of(at.rank), &RankFactors::pcie, bytes / std::max(h.host_bandwidth.value, 1.0), price_ns);
  out.push_back({device_link(device_of(at.rank), direction == CopyDirection::to_device ? pcie_in : pcie_out),
                 std::min(device, 1.0 / static_cast<double>(ranks_per_device_)), at.on_device, bytes});
  out.push_back({first_memory_ + static_cast<LinkId>(domain_of(at.rank)),
                 fraction_of(bytes / std::max(domain_bytes_per_s(), 1.0), price_ns), at.on_domain, bytes});
}

std::int64_t ClusterLinks::whole_ns(std::int64_t price_ns, OpKind kind, const GroupShape& shape, double payload) const {
  const std::int64_t model_ns = std::llround(1e9 * cost_.collective_seconds(kind, shape, payload));
  return model_ns > price_ns + 1 ? model_ns : price_ns;
}

void ClusterLinks::collective(const GroupLinks& group, OpKind kind, double payload, std::int64_t price_ns,
                              std::vector<Demand>& out) const {
  if (group.shape.ranks <= 1 || payload <= 0.0) return;
  price_ns = whole_ns(price_ns, kind, group.shape, payload);
  const CostModel::LinkSeconds busy = cost_.link_seconds(kind, group.shape, payload);
  const double inside_bytes = busy.inside * cost_.hardware().intra.bandwidth.value,
               port_bytes = busy.port * cost_.hardware().inter.bandwidth.value;
  if (has_bus_)  // of all members of a node together
    for (const auto& [node, times] : group.nodes)
      out.push_back({first_bus_ + static_cast<LinkId>(node), fraction_of(busy.inside, price_ns), times, inside_bytes});
  for (const auto& [device, members, times] : group.devices) {
    if (const double f = part(device, &RankFactors::nvlink, busy.inside * members, price_ns); f > 0.0 && !has_bus_)
      for (bool outward : {false, true}) out.push_back(inside(device, outward, f, times, inside_bytes * members));
    if (const double f = part(device, &RankFactors::network, busy.port * members, price_ns); f > 0.0)
      for (DeviceLink port : {port_in, port_out})
        out.push_back({device_link(device, port), f, times, port_bytes * members});
  }
  for (const GroupLinks::Spine& spine : group.spines) {
    const double leaves = spreads(kind) ? spine.spread : spine.ring;
    const double seconds = busy.port * (leaves + busy.crosses * (spine.all - leaves)),
                 f = fraction_of(seconds, price_ns);
    if (f <= 0.0) continue;
    for (bool up : {false, true})
      out.push_back({spine_link(spine.spine, up), f, spine.times, seconds * spine_bytes_per_s()});
  }
}

void ClusterLinks::send(Rank from, Rank to, double bytes, std::int64_t price_ns, std::vector<Demand>& out,
                        std::int32_t on_spine) const {
  if (bytes <= 0.0 || from == to) return;
  const bool same_node = node_of(from) == node_of(to);
  const auto rail = [this](Rank r) { return device_of(r) % devices_per_node_; };
  const GroupShape pair{2, same_node ? 1 : 2, same_node ? 2 : 1, std::abs(node_of(from) - node_of(to)) + 1,
                        same_node || rail(from) == rail(to)};
  price_ns = whole_ns(price_ns, OpKind::send, pair, bytes);
  const CostModel::LinkSeconds busy = cost_.link_seconds(OpKind::send, pair, bytes);
  const double inside_bytes = busy.inside * cost_.hardware().intra.bandwidth.value,
               port_bytes = busy.port * cost_.hardware().inter.bandwidth.value;
  if (busy.inside > 0.0 && has_bus_) {
    out.push_back(
        {first_bus_ + static_cast<LinkId>(node_of(from)), fraction_of(busy.inside, price_ns), 1, inside_bytes});
  } else if (busy.inside > 0.0) {  // what goes to another rail first passes NVLink at the sender's node
    const auto take = [&](Rank r, bool outward) {
      out.push_back(inside(device_of(r), outward, part(device_of(r), &RankFactors::nvlink, busy.inside, price_ns), 1,
                           inside_bytes));
    };
    take(from, true);
    if (same_node) take(to, false);
  }
  if (same_node || busy.port <= 0.0) return;
  for (const auto& [rank, link] : {std::pair{from, port_out}, {to, port_in}})
    out.push_back({device_link(device_of(rank), link),
                   part(device_of(rank), &RankFactors::network, busy.port, price_ns), 1, port_bytes});
  const bool leaves_pod = node_of(from) / pod_nodes_ != node_of(to) / pod_nodes_;
  const double through = port_bytes * (leaves_pod ? 1.0 : busy.crosses),
               f = fraction_of(through / spine_bytes_per_s(), price_ns);
  if (!has_spine_ || f <= 0.0) return;
  out.push_back({spine_link(spine_of(from), true), f, on_spine, through});
  out.push_back({spine_link(spine_of(to), false), f, on_spine, through});
}

}  // namespace hotbunk
