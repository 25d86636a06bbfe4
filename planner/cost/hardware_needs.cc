// What a price stands on: a figure that nobody gave has no stand-in, a product that a device lacks no rate.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "planner/cost/hardware.h"
#include "spec/scenario.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

Diagnostic no_products(const Hardware& h, const std::string& gpu, const std::string& precision, const char* key,
                       const std::string& parameters) {
  std::vector<std::string> has, taken;
  for (const auto& [name, flops] : h.peak) has.push_back(name);
  // What the key takes of them; products in the parameters' own dtype always are.
  for (const std::string& choice : find_scenario_key(key)->choices)
    if ((choice == "params" && h.peak_flops(parameters) > 0.0) || h.peak_flops(choice) > 0.0) taken.push_back(choice);
  return {.code = "E260",
          .message = fmt::format("{} has no {} products, which {} asks for", gpu, precision, key),
          .where = {},
          .notes = {has.empty() ? "no peak of it is known" : fmt::format("it has {}", fmt::join(has, ", "))},
          .help = fmt::format("{}give cluster.gpu.tflops.{} if the GPU has it after all",
                              taken.empty() ? "" : fmt::format("set {} to {}, or ", key, fmt::join(taken, " or ")),
                              precision)};
}

Diagnostic unknown_figure(std::string what, const char* key) {
  return {.code = "E264",
          .message = fmt::format("no {} is known", what),
          .where = {},
          .notes = {},
          .help = fmt::format("set {}", key)};
}

Diagnostics missing(const Scenario& s, const Hardware& h) {
  const ClusterSpec& c = s.cluster;
  const bool rolls = s.algorithm.name != AlgorithmName::sft, params = s.train.precision.gemm == "params";
  Diagnostics out;
  const auto check_products = [&](const std::string& precision, const char* key) {
    const std::string trained(name_of(s.train.precision.params));
    if (h.peak_flops(precision) <= 0.0) out.push_back(no_products(h, c.gpu.name, precision, key, trained));
  };
  const std::string trained(name_of(s.train.precision.params)), sampled(name_of(s.rollout.dtype));
  check_products(trained, "train.precision.params");
  if (!params) check_products(s.train.precision.gemm, "train.precision.gemm");
  // Attention and the head keep 16 bits where the layers' products have fewer (TrainModel).
  if (!params && s.train.precision.gemm != "tf32" && trained != "bf16") check_products("bf16", "train.precision.gemm");
  if (rolls && sampled != trained) check_products(sampled, "rollout.dtype");
  if (rolls && !s.rollout.quantization.empty()) check_products(s.rollout.quantization, "rollout.dtype");
  if (h.memory_bandwidth <= 0.0)
    out.push_back(
        unknown_figure(fmt::format("memory bandwidth of GPU '{}'", c.gpu.name), "cluster.gpu.memory_gb_per_s"));
  if (h.host_bandwidth.value <= 0.0)
    out.push_back(unknown_figure(fmt::format("host link of GPU '{}'", c.gpu.name), "cluster.gpu.pcie_gb_per_s"));
  if (c.ranks_per_node() > 1 && h.intra.bandwidth.value <= 0.0)
    out.push_back(unknown_figure("link between the GPUs of a node",
                                 "cluster.gpu.nvlink_gb_per_s, or cluster.gpu.pcie_gb_per_s where there is no NVLink"));
  if (c.nodes > 1 && h.inter.bandwidth.value <= 0.0)
    out.push_back(unknown_figure("network between the nodes", "cluster.network_gb_per_s"));
  if (c.host_memory_bytes <= 0) out.push_back(unknown_figure("host memory of a node", "cluster.host_memory_gib"));
  return out;
}

}  // namespace

Result<Hardware> hardware_for(const Scenario& s, const std::filesystem::path& catalogue) {
  auto hardware = hardware_for(s.cluster, catalogue);
  if (!hardware) return hardware;
  if (Diagnostics lacking = missing(s, *hardware); !lacking.empty()) return fail(std::move(lacking));
  return hardware;
}

}  // namespace hotbunk
