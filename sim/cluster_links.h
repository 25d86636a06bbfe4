// The links of a cluster as SharedLinks, and what copies, collectives and sends take of them.
//
//   link           of each  capacity, one way                                  who is on it
//   pcie           device   Hardware::host_bandwidth                           copies between device and host
//   nvlink         device   Hardware::intra.bandwidth                          what stays in a node
//   port           device   Hardware::inter.bandwidth                          what leaves a node
//   host memory    NUMA     Hardware::host_memory_bandwidth / numa_domains,    copies of the devices near it
//                  domain   both ways
//   bus            node     intra.bandwidth, both ways                         instead of nvlink:
//   Hardware::shared_transport spine          pod      inter.bandwidth x ports below / oversubscription   what leaves a
//   pod, or changes its rail
//
// Devices without NVLink talk over pcie. Of rails every one has a spine link of its own in each pod. pod_nodes 0: every
// node is a pod. rail_only: no spine.
//
// A job takes of a link the seconds that its bytes keep it busy at full rate over its price, at most 1: alone it is
// never slower than its price. Prices that assume company leave room for it, and are not slowed by it a second time:
//   CostModel::node_copy_seconds      all ranks of the node copy: each takes 1 / ranks of the memory that it is near
//   priced blocks                     what is hidden elsewhere is not in their price, all bytes are in their payload:
//   the
//                                     job takes what it would while it takes as long as the payload does
//   ranks that share a device         a copy takes at most 1 / ranks_per_device of its pcie
//   collectives that leave a pod      all ports do: with pods of a node each takes its ports' part of the spine; of
//                                     larger pods a ring takes less, as only its last node's ports leave the pod
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "sim/disturbed_cost.h"
#include "sim/links.h"
#include "trace/trace.h"

namespace hotbunk {

enum class CopyDirection : std::uint8_t { to_device, to_host };

class ClusterLinks {
 public:
  /// Adds the links of the first `num_ranks` ranks' nodes to `links`. `cost` outlives this. `slow`: by rank, or empty;
  /// a device's link has its rate over the factor, which the price of who uses it is expected to have in it already.
  ClusterLinks(const CostModel& cost, const ClusterSpec&, Rank num_ranks, SharedLinks& links,
               std::span<const RankFactors> slow = {});

  /// A rank as a job's place. `alike`: the ranks, itself among them, that it stands for; empty: itself alone.
  struct RankLinks {
    Rank rank = 0;
    std::int32_t on_device = 1, on_domain = 1;  // of those it stands for
  };
  RankLinks links_of(Rank, std::span<const Rank> alike = {}) const;

  /// A group as a job's place: the links of its members, and how many alike groups are on each.
  struct GroupLinks {
    struct Device {
      std::int64_t device;
      std::int32_t members, times;
    };
    struct Node {
      std::int64_t node;
      std::int32_t times;
    };
    /// Spine of one pod, or of one of its rails. Seconds on it per second of a member's port: when all that passes the
    /// ports goes there, what a ring and what an all-to-all send out of the pod.
    struct Spine {
      std::int64_t spine;
      double all = 0, ring = 0, spread = 0;
      std::int32_t times = 1;
    };
    GroupShape shape;
    std::vector<Device> devices;
    std::vector<Node> nodes;
    std::vector<Spine> spines;
  };
  /// `alike`: the groups, itself among them, that it stands for; empty: itself alone. To be made once per group.
  GroupLinks links_of(const std::vector<Rank>& members, std::span<const std::vector<Rank>> alike = {}) const;

  /// What the links have carried, those that carried alike as one, of each kind the one that was busiest first. Only
  /// links of `players` have jobs: `player_of` says by rank who stands for it.
  std::vector<LinkTraffic> traffic(std::span<const Rank> player_of) const;

  // What a job of this price takes, behind what is in `out`. Price in ns, alone; bytes and payload as CostModel has
  // them.

  void copy(const RankLinks&, CopyDirection, double bytes, std::int64_t price_ns, std::vector<Demand>& out) const;
  /// A collective of the group, all members together. Pairwise kinds are send().
  void collective(const GroupLinks&, OpKind, double payload_bytes, std::int64_t price_ns,
                  std::vector<Demand>& out) const;
  /// Of one rank to another: the sender's links out, the receiver's in. `on_spine`: alike sends that share the spine.
  void send(Rank from, Rank to, double bytes, std::int64_t price_ns, std::vector<Demand>& out,
            std::int32_t on_spine = 1) const;

 private:
  enum DeviceLink : std::uint8_t { pcie_in, pcie_out, nvlink_in, nvlink_out, port_in, port_out, num_device_links };

  std::int64_t device_of(Rank r) const { return r / ranks_per_device_; }
  std::int64_t node_of(Rank r) const { return device_of(r) / devices_per_node_; }
  /// The NUMA domain whose memory a rank copies to and from: a node's first devices are near its first.
  std::int64_t domain_of(Rank r) const {
    return node_of(r) * numa_domains_ + device_of(r) % devices_per_node_ * numa_domains_ / devices_per_node_;
  }
  double domain_bytes_per_s() const {
    return cost_.hardware().host_memory_bandwidth.value / static_cast<double>(numa_domains_);
  }
  /// The spine link that a rank's port leads to.
  std::int64_t spine_of(Rank) const;
  LinkId device_link(std::int64_t device, DeviceLink kind) const {
    return first_device_ + static_cast<LinkId>(device) * num_device_links + kind;
  }
  LinkId spine_link(std::int64_t spine, bool up) const {
    return first_spine_ + static_cast<LinkId>(spine) * 2 + (up ? 1 : 0);
  }
  /// The price, or what the model says of so much payload, if that is longer.
  std::int64_t whole_ns(std::int64_t price_ns, OpKind, const GroupShape&, double payload) const;
  /// Of a device's link that is busy for so long at its usual rate, by a job that takes `price_ns` alone.
  double part(std::int64_t device, double RankFactors::*kind, double seconds, std::int64_t price_ns) const;
  /// The link of a device that is `nvlink` where there is one.
  Demand inside(std::int64_t device, bool out, double fraction, std::int32_t times, double bytes) const;

  /// Of a spine link, one way.
  double spine_bytes_per_s() const;
  /// How many times slower than its kind a device's link is.
  double slowness(std::int64_t device, DeviceLink) const;

  const CostModel& cost_;
  const SharedLinks& links_;
  std::int64_t num_devices_ = 0, num_nodes_ = 0, num_spines_ = 0;
  std::int64_t ranks_per_device_, devices_per_node_, numa_domains_, pod_nodes_;
  bool rails_, has_spine_, has_nvlink_, has_bus_;
  double oversubscription_;
  std::vector<RankFactors> slow_;  // by device, or empty
  LinkId first_device_ = 0, first_memory_ = 0, first_bus_ = 0, first_spine_ = 0;
};

}  // namespace hotbunk
