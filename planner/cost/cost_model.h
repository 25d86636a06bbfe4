// CostModel: op + hardware -> time. The one place where FLOPs and bytes become seconds; the simulator prices ops here,
// the planner's closed forms call the same primitives.
#pragma once
#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/boxes.h"
#include "graph/op.h"
#include "graph/plan.h"
#include "planner/cost/hardware.h"

namespace hotbunk {

inline constexpr int num_dtypes = 7;

/// Where the members of a group sit. `per_node`: members on one node (the largest count).
struct GroupShape {
  std::int64_t ranks = 1;
  std::int64_t nodes = 1;
  std::int64_t per_node = 1;
  std::int64_t span = 0;  // nodes from the first member to the last, 0: as many as `nodes`
  bool aligned = true;    // members have the same places in all their nodes: rings stay on their rails

  /// `ranks` members, `stride` ranks apart, on nodes of `node` ranks, starting at a node's first rank.
  static GroupShape strided(std::int64_t ranks, std::int64_t stride, std::int64_t node);
};

/// Calibrated factors over a formula: measured / predicted, interpolated between points in log space.
class Correction {
 public:
  void add(std::array<double, 3> at, double measured_over_predicted);
  /// 1 without points. Shepard interpolation of the log ratio; exact at a point, constant far away.
  double at(std::array<double, 3> where) const;
  bool empty() const { return points_.empty(); }

 private:
  struct Point {
    std::array<double, 3> log_at;
    double log_ratio;
  };
  std::vector<Point> points_;
};

/// Where a rank of a plan stands: what the prices of its ops ask again and again.
struct RankPlace {
  Places places;                        // in each family
  std::vector<GroupShape> groups;       // of its group in each family
  std::bitset<max_sections> on_host{};  // sections
};

/// Which of a program's sections lie in the host's memory.
std::bitset<max_sections> host_sections(const Program&);

class CostModel {
 public:
  CostModel(Hardware, const ClusterSpec&);

  /// Time of one op of `rank` on its stream once it starts, in nanoseconds (0 for alloc, free, events). Collectives:
  /// from the moment the last participant has arrived. Ranks that share a device are taken to be busy together, as
  /// SPMD programs keep them. Deterministic.
  std::int64_t op_nanoseconds(const Plan&, const RankPlace&, const Op&, const Sizes&) const;
  std::int64_t op_nanoseconds(const Plan& plan, Rank rank, const Op& op, const Sizes& sizes) const {
    return op_nanoseconds(plan, place_of(plan, rank), op, sizes);
  }
  RankPlace place_of(const Plan&, Rank) const;

  /// The size of a matrix product, all that a library makes its kernel for; nothing for other ops.
  std::optional<std::array<double, 3>> kernel_size(const Op&, const Sizes&) const;

  /// What a timed run of an op is to a calibration profile: its name and coordinates as the lookups of this class form
  /// them. nullopt for ops that cost nothing or did nothing.
  std::optional<Measurement> measurement_of(const Plan&, Rank, const Op&, const Sizes&, double seconds) const;

  // The primitives, in seconds; sizes are those of one rank.

  /// x[m,k] · W[n,k]^T, each operand and the result in `dtype`.
  double gemm_seconds(double m, double n, double k, DType dtype) const;
  /// The same with the peak (FLOP/s) of any precision and the bytes that operands and result take.
  double gemm_seconds(double m, double n, double k, double peak, double bytes) const;
  /// A product of every expert's rows by its matrix, of `flops` and `bytes` in all.
  double grouped_seconds(const Op&, double flops, double bytes) const;
  /// Fused attention of `flops` at `keys` visible keys per query on average.
  double attention_seconds(double flops, double keys, double bytes, bool backward, double peak,
                           AttentionKernel = AttentionKernel::library) const;
  /// A streaming kernel that moves `bytes` of device memory.
  double memory_seconds(double bytes) const;
  /// Payload as DESIGN defines it: whole tensor of all-gather, reduce-scatter, all-reduce, broadcast; what one rank
  /// sends for all-to-all and P2P.
  double collective_seconds(OpKind, const GroupShape&, double payload_bytes) const;
  /// What a collective keeps busy, as seconds at the links' full rates, without latencies, protocols and corrections:
  ///   inside   a member's link inside its node, each way; with Hardware::shared_transport the node's bus, all members;
  ///            0 where it has no other member to talk to there, though the price looks at it
  ///   port     a member's network port, each way
  ///   crosses  share of what passes the port that takes the spine because it is for another rail, in [0, 1]
  /// Of an all-reduce across nodes: by the algorithm that the price is of. Not included: oversubscription of the spine.
  struct LinkSeconds {
    double inside = 0, port = 0, crosses = 0;
  };
  LinkSeconds link_seconds(OpKind, const GroupShape&, double payload_bytes) const;
  /// An all-to-all of which a rank sends `network` bytes to other nodes and `node` bytes inside nodes, at the same
  /// time.
  double exchange_seconds(const GroupShape&, double network, double node) const;
  /// Bytes that one rank sends for that payload (ring; DESIGN: wire).
  static double wire_bytes(OpKind, std::int64_t ranks, double payload_bytes);
  /// Between device and host memory, one direction, nothing else on the link. For feed and fetch with what the driver
  /// does to make or take the data, where that was measured.
  double host_copy_seconds(double bytes, OpKind = OpKind::copy) const;
  /// The same while every rank of the node copies as much: their links share its host memory.
  double node_copy_seconds(double bytes) const {
    return bytes > 0.0 ? std::max(host_copy_seconds(bytes), host_memory_seconds(bytes)) : 0.0;
  }
  /// CPU work that moves so many bytes for each rank of the node, all of them at once.
  double host_memory_seconds(double bytes) const {
    return bytes * static_cast<double>(ranks_per_node()) / std::max(hardware_.host_memory_bandwidth.value, 1.0);
  }
  /// Taking memory for the arena or giving it back, of the device or of the host.
  double map_seconds(double bytes, OpKind = OpKind::map, Space = Space::device) const;

  double peak_flops(DType t) const { return peaks_[static_cast<std::size_t>(t)]; }
  double peak_flops(const std::string& precision) const { return hardware_.peak_flops(precision); }
  const Hardware& hardware() const { return hardware_; }
  std::int64_t ranks_per_node() const { return ranks_per_node_; }
  GroupShape shape_of(const std::vector<Rank>& members) const;

 private:
  void load_measurements(const ClusterSpec&);
  double formula_seconds(const Measurement&) const;
  /// What moves in `moving` seconds at the link's rate, with start and steps, by the best protocol.
  double protocol_seconds(const GroupShape&, double intra_hops, double inter_hops, double moving) const;
  double compute_seconds(const Op&, const Sizes&, const Places&) const;
  double correction(OpKind, DType, std::array<double, 3> at) const;
  /// Bytes over a rank's own links, in seconds at their full rates; nodes > 1: moving at the same time.
  struct Moving {
    double inside = 0, outside = 0, more_hops = 0;  // hops: over NVLink, to another rail
    double port = 0, crosses = 0;                   // LinkSeconds
    double seconds() const { return std::max(inside, outside); }
  };
  /// A collective's formula, and what it moves.
  struct Priced {
    double seconds = 0;
    Moving moving;
  };
  Moving across_nodes(OpKind, const GroupShape&, double inside_wire, double port_wire) const;
  Priced all_reduce_across_nodes(const GroupShape&, double payload) const;
  Priced price_collective(OpKind, const GroupShape&, double payload) const;

  Hardware hardware_;
  std::array<double, num_dtypes> peaks_{};  // FLOP/s, of hardware_: a price asks for them by the million
  std::int64_t ranks_per_node_ = 1, pod_nodes_ = 0;
  NetworkTopology topology_ = NetworkTopology::leaf;
  double oversubscription_ = 1.0;
  double share_ = 1.0;  // ranks of a device that its rates are divided among
  std::array<std::array<Correction, num_dtypes>, num_op_kinds> corrections_;
  Correction host_, host_map_, host_unmap_;
};

}  // namespace hotbunk
