#include <fmt/format.h>

#include "spec/key_makers.h"

namespace hotbunk {
namespace {

using namespace key_makers;

ScenarioKey peak_flops(const std::string& precision) {
  constexpr double unit = 1e12;
  return make(
      "cluster.gpu.tflops." + precision, KeyType::sourced, least_rate, 1e9,
      {"TFLOP/s", fmt::format("dense {} peak", precision), "from the GPU"},
      [precision](const Scenario& s) -> KeyValue {
        const auto at = s.cluster.gpu.flops.find(precision);
        if (at == s.cluster.gpu.flops.end()) return std::monostate{};
        return Sourced{std::round(at->second.value / unit * 1e6) / 1e6, at->second.source};
      },
      [precision](Scenario& s, const KeyValue& v) {
        const auto& given = std::get<Sourced>(v);
        s.cluster.gpu.flops[precision] = {std::round(given.value * 1e6) * (unit / 1e6), given.source};
      });
}

}  // namespace

void add_cluster_keys(std::vector<ScenarioKey>& keys) {
  const std::string from_gpu = "from the GPU";
  ScenarioKey base = string("cluster.gpu.base", HB_FIELD(cluster.gpu.name),
                            {"", "catalogue GPU that the other keys of this map change; `gpu: NAME` is short for it",
                             "local-cpu when there is no gpu key; none when the map spells the GPU out"});
  base.in_resolved = false;
  base.set = [](Scenario&, const KeyValue&) {};  // the loader reads the catalogue before any other key
  keys.push_back(std::move(base));
  keys.push_back(string("cluster.gpu.name", HB_FIELD(cluster.gpu.name), {"", "name in reports", from_gpu}));
  keys.push_back(bytes("cluster.gpu.memory_gib", HB_FIELD(cluster.gpu.memory_bytes), gib, 1.0 / 1024, max_gib,
                       {"GiB", "what a process can allocate on an empty device", from_gpu}));
  keys.push_back(sourced("cluster.gpu.memory_gb_per_s", HB_FIELD(cluster.gpu.memory_bandwidth), 1e9, least_rate,
                         max_rate, {"GB/s", "device memory bandwidth", from_gpu}));
  keys.push_back(
      sourced("cluster.gpu.sms", HB_FIELD(cluster.gpu.sms), 1.0, 0, 1e5,
              {"", "streaming multiprocessors, over which products spread their tiles; 0 = not known", from_gpu}));
  keys.push_back(sourced("cluster.gpu.nvlink_gb_per_s", HB_FIELD(cluster.gpu.nvlink_bandwidth), 1e9, 0, max_rate,
                         {"GB/s", "NVLink bandwidth of one GPU, one way; 0 = none", from_gpu}));
  keys.push_back(sourced("cluster.gpu.pcie_gb_per_s", HB_FIELD(cluster.gpu.pcie_bandwidth), 1e9, least_rate, max_rate,
                         {"GB/s", "host link bandwidth of one GPU, one way, pinned memory", from_gpu}));
  keys.push_back(boolean("cluster.gpu.nvlink_sharp", HB_FIELD(cluster.gpu.nvlink_sharp),
                         {"", "reductions inside the NVLink switch (NVLS)", from_gpu}));
  keys.push_back(boolean("cluster.gpu.cpu", HB_FIELD(cluster.gpu.is_cpu),
                         {"", "the device is a machine's cores and memory, not a GPU", from_gpu}));
  keys.push_back(sourced("cluster.gpu.price_per_hour", HB_FIELD(cluster.gpu.price_per_hour), 1.0, 0, 1e6,
                         {"money/h", "price of one GPU; 0 = unknown", from_gpu}));
  for (const char* precision : {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "int8", "nvfp4"})
    keys.push_back(peak_flops(precision));

  keys.push_back(integer("cluster.nodes", HB_FIELD(cluster.nodes), 1, max_ranks, {"", "number of nodes"}));
  keys.push_back(integer("cluster.gpus_per_node", HB_FIELD(cluster.gpus_per_node), 1, 4096,
                         {"", "devices of one node, all on one NVLink domain where the GPU has NVLink", from_gpu}));
  keys.push_back(integer("cluster.ranks_per_device", HB_FIELD(cluster.ranks_per_device), 1, 4096,
                         {"", "ranks that share one physical device, its memory, compute and links"}));
  const std::string share = "cluster.gpu.memory_gib / cluster.ranks_per_device";
  keys.push_back(bytes("cluster.device_memory_gib", HB_FIELD(cluster.device_memory_bytes), gib, 1.0 / (1 << 20),
                       max_gib, {"GiB", "hard capacity of one rank; a plan that needs more is refused", share}));
  ScenarioKey in_mib = bytes("cluster.device_memory_mib", HB_FIELD(cluster.device_memory_bytes), mib, 1.0 / 1024,
                             max_gib * 1024, {"MiB", "the same in MiB; give one of the two", share});
  in_mib.in_resolved = false;
  keys.push_back(std::move(in_mib));
  keys.push_back(bytes("cluster.host_memory_gib", HB_FIELD(cluster.host_memory_bytes), gib, 1.0 / (1 << 20), max_gib,
                       {"GiB", "host memory of one node", from_gpu}));
  keys.push_back(sourced("cluster.host_memory_gb_per_s", HB_FIELD(cluster.host_memory_bandwidth), 1e9, least_rate,
                         max_rate, {"GB/s", "bandwidth of one node's host memory, all its channels", from_gpu}));
  keys.push_back(sourced("cluster.numa_domains", HB_FIELD(cluster.numa_domains), 1.0, 1, 4096,
                         {"",
                          "parts of a node's host memory, each with its share of the bandwidth and near as many of the "
                          "node's devices, which copy to and from it",
                          from_gpu}));
  keys.push_back(sourced("cluster.network_gb_per_s", HB_FIELD(cluster.network_bandwidth), 1e9, least_rate, max_rate,
                         {"GB/s", "bandwidth of one GPU between nodes, one way (400 Gb/s = 50 GB/s)", from_gpu}));
  keys.push_back(sourced("cluster.network_latency_us", HB_FIELD(cluster.network_latency), 1e-6, 0, 1e9,
                         {"us", "latency of one step between nodes", from_gpu}));
  keys.push_back(sourced("cluster.nvlink_latency_us", HB_FIELD(cluster.nvlink_latency), 1e-6, 0, 1e9,
                         {"us", "latency of one step inside a node", from_gpu}));
  keys.push_back(choice("cluster.network_topology", HB_FIELD(cluster.network_topology),
                        {"",
                         "leaf: all ports of a node under one switch; rail-optimized: port i of every node of a pod "
                         "under switch i; rail-only: the same without a spine"}));
  keys.push_back(real("cluster.oversubscription", HB_FIELD(cluster.oversubscription), 1, 1000,
                      {"", "of the network's spine; 1 = full bisection"}));
  keys.push_back(integer("cluster.pod_nodes", HB_FIELD(cluster.pod_nodes), 0, max_ranks,
                         {"nodes",
                          "under one leaf switch or set of rails: only what leaves them crosses the spine; "
                          "0 = all traffic between nodes does"}));
  keys.push_back(string("cluster.calibration", HB_FIELD(cluster.calibration),
                        {"", "calibration profile: catalogue name or path; empty = datasheet efficiencies"}));
}

}  // namespace hotbunk
