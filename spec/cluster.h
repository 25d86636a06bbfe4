// ClusterSpec: GPUs, nodes, links and host memory, from the catalogue or spelled out. Rates in bytes/s and FLOP/s.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace hotbunk {

/// A number and where it comes from: "datasheet …", "measured …", "fitted on …". One that nobody gave has neither: not
/// known is not zero.
struct Sourced {
  double value = 0.0;
  std::string source;
  bool known() const { return value != 0.0 || !source.empty(); }
  bool operator==(const Sourced&) const = default;
};

struct GpuSpec {
  std::string name;
  std::int64_t memory_bytes = 0;  // what a process can allocate in total on an empty device
  Sourced memory_bandwidth;       // bytes/s
  std::map<std::string, Sourced>
      flops;                  // dense peak by precision name: "fp32", "tf32", "bf16", "fp8", "nvfp4"…, FLOP/s
  Sourced sms;                // streaming multiprocessors that tiles of products are spread over, 0: not known
  Sourced nvlink_bandwidth;   // bytes/s one way, per GPU, 0: none
  Sourced pcie_bandwidth;     // bytes/s one way, per GPU (pinned)
  bool nvlink_sharp = false;  // NVLS in the switch
  bool is_cpu = false;        // the local machine's cores as a device
  Sourced price_per_hour;     // money per GPU-hour, 0: unknown

  double peak_flops(const std::string& precision) const;  // 0 when unknown
  bool operator==(const GpuSpec&) const = default;
};

/// How the nodes' ports reach each other below the spine.
enum class NetworkTopology : std::uint8_t {
  leaf,            // all ports of a node under one switch
  rail_optimized,  // port i of every node of a pod under switch i
  rail_only        // the same, and no spine: other rails are reached over NVLink
};

struct ClusterSpec {
  GpuSpec gpu;
  std::int64_t nodes = 1, gpus_per_node = 1;
  std::int64_t ranks_per_device = 1;     // > 1: several ranks share one physical device
  std::int64_t device_memory_bytes = 0;  // capacity of one rank; default gpu.memory_bytes / ranks_per_device
  std::int64_t host_memory_bytes = 0;    // per node, 0: not known
  Sourced host_memory_bandwidth;         // bytes/s of a node's CPUs on their memory, datasheet
  Sourced numa_domains;                  // parts of that, each near as many of the node's devices; not known: 1
  Sourced network_bandwidth;             // bytes/s one way, per GPU, between nodes
  Sourced network_latency;               // seconds, one step between nodes
  Sourced nvlink_latency;                // seconds, one step inside a node
  NetworkTopology network_topology = NetworkTopology::leaf;
  double oversubscription = 1.0;  // of the spine
  std::int64_t pod_nodes = 0;     // nodes under one leaf or set of rails, which reach each other past the spine
  std::string calibration;        // catalogue name or path of a calibration profile; "" = datasheet efficiencies

  std::int64_t ranks() const { return nodes * gpus_per_node * ranks_per_device; }
  std::int64_t ranks_per_node() const { return gpus_per_node * ranks_per_device; }
  /// NUMA domains of a node with as many devices each: the most that divide them and are no more than there are.
  std::int64_t even_numa_domains() const {
    auto domains = std::clamp<std::int64_t>(static_cast<std::int64_t>(numa_domains.value), 1, gpus_per_node);
    while (gpus_per_node % domains != 0) --domains;
    return domains;
  }
  bool operator==(const ClusterSpec&) const = default;
};

}  // namespace hotbunk
