#include "planner/cost/hardware.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "spec/loader.h"

namespace hotbunk {
namespace {

Sourced stated(double value, const char* why) { return {value, why}; }
Sourced known_or(const Sourced& given, double value, const char* why) {
  return given.known() ? given : stated(value, why);
}

/// The local machine's cores, shared memory and TCP as a "GPU" and its links.
void cpu_defaults(Hardware& h, const ClusterSpec& c) {
  h.memory_efficiency = stated(0.8, "stated: streaming kernels on cores");
  h.gemm = {stated(0.85, "stated: packed fp32 GEMM against the FMA peak"), stated(16, "stated"),
            stated(0, "no waves on cores")};
  h.attention = {stated(0.25, "stated"), stated(0.25, "stated"), stated(16, "stated")};
  h.shared_transport = true;
  h.nvls_gain = stated(1.0, "no switch");
  // 256 MiB all-gather over 4 ranks through shared memory moved 11.2 GB/s in total on a machine that reads 33 GB/s.
  h.intra = {
      stated(c.gpu.memory_bandwidth.value / 3.0, "stated: a copy in and a copy out, a third of memory bandwidth"),
      stated(20e-6, "stated: wake-up of a waiting thread"), known_or(c.nvlink_latency, 10e-6, "stated")};
  h.inter = {stated(c.network_bandwidth.value * 0.8, "stated: 80 % of the network"),
             stated(100e-6, "stated: TCP round trip"), known_or(c.network_latency, 50e-6, "stated")};
  h.host_bandwidth = stated(c.gpu.memory_bandwidth.value / 2.5, "stated: memcpy reads, writes and fetches its target");
  h.host_latency = stated(2e-6, "stated");
  h.host_memory_bandwidth = stated(c.gpu.memory_bandwidth.value * 0.8, "stated: the device's own memory");
  h.map_bandwidth = stated(16e9, "stated: a quarter of a microsecond per 4 KiB page");
  h.cores = stated(0, "uncalibrated: a rank's share of the device, no waiting for cores");
  h.wake = stated(0, "uncalibrated");
  h.thread_switch = stated(0, "uncalibrated");
  h.call = stated(0, "uncalibrated");
  h.decision = stated(0, "uncalibrated");
  h.first_use = stated(0, "uncalibrated");
  h.time_slice = stated(4e-3, "stated: a tick of 250 Hz, Debian's kernels");
  h.launch = stated(1e-6, "stated");
  h.kernel_overhead = stated(3e-6, "stated: fork and join of the cores");
  h.overlap_slowdown = stated(0.5, "stated: communication runs on the same cores");
}

void gpu_defaults(Hardware& h, const ClusterSpec& c) {
  h.memory_efficiency = stated(0.78, "RMSNorm on H200: 3.7-3.8 of 4.8 TB/s");
  h.gemm = {stated(0.80, "bf16 GEMM on H100/H200: 780-795 of 989 TF/s"), stated(128, "stated: about two tile steps"),
            known_or(c.gpu.sms, 0, "not known: no wave quantisation")};
  h.attention = {stated(0.69, "cuDNN SDPA forward, H200, 16-32k: 673-688 of 989 TF/s"),
                 stated(0.58, "cuDNN SDPA backward, H200, 16-32k: 579-581 of 989 TF/s"),
                 stated(400, "cuDNN SDPA, H200, 2k: 484 of 688 TF/s at 1k visible keys")};
  // Hopper (it multiplies FP8, but not yet in blocks with scales of their own): what Ampere's instructions reach there
  // is a rate, whatever the peak.
  if (const double peak = h.peak_flops("bf16"); h.peak_flops("fp8") > 0.0 && h.peak_flops("mxfp8") <= 0.0 && peak > 0.0)
    h.flash2 = {stated(std::min(h.attention.forward.value, 341e12 / peak),
                       "FlashAttention-3 paper (2407.08608), figure 5: FlashAttention-2, heads of 128, causal, H100: "
                       "298 TF/s at 2k, 335 at 16k"),
                stated(std::min(h.attention.backward.value, 326e12 / peak),
                       "FlashAttention-3 paper, figure 6: FlashAttention-2's backward, heads of 128, H100: 291 TF/s at "
                       "2k, 322 at 16k"),
                stated(200, "the same figures: about 150 keys forward, 250 backward")};
  const bool nvlink = c.gpu.nvlink_bandwidth.value > 0.0;
  const double wire = nvlink ? c.gpu.nvlink_bandwidth.value : c.gpu.pcie_bandwidth.value;
  h.intra = {stated(wire * 0.80, "NCCL ring on 8 H200: 361-367 of 450 GB/s"),
             stated(12e-6, "small NCCL all-reduce on 8 H200: 20-25 us"),
             known_or(c.nvlink_latency, 0.8e-6, "small NCCL all-reduce on 8 H200: 20-25 us over 14 steps")};
  h.nvls_gain =
      c.gpu.nvlink_sharp ? stated(1.31, "NCCL all-reduce 8 H200: NVLS 480, ring 367 GB/s") : stated(1.0, "no NVLS");
  h.inter = {stated(c.network_bandwidth.value * 0.90, "NCCL all-reduce, 4 nodes: 365 of 400 GB/s"),
             stated(20e-6, "stated"), known_or(c.network_latency, 5e-6, "stated: one InfiniBand hop with NCCL")};
  h.host_bandwidth = stated(c.gpu.pcie_bandwidth.value, "pinned copies run at the link's usable rate");
  h.host_latency = stated(10e-6, "stated");
  // A dual-socket server streams at about four fifths of what its channels add up to (STREAM triad).
  h.host_memory_bandwidth =
      c.host_memory_bandwidth.known()
          ? stated(c.host_memory_bandwidth.value * 0.80, "stated: 80 % of the channels' rate, as STREAM reaches")
          : stated(41e9 * static_cast<double>(c.gpus_per_node),
                   "stated: an eighth of two sockets of DDR4-3200 for each GPU, at 80 %");
  h.map_bandwidth = stated(130e9, "stated: 15 us to create and map a 2 MiB chunk");
  h.time_slice = stated(4e-3, "streams are hardware");
  h.launch = stated(4.5e-6, "stated: eager launch of one kernel with its framework overhead");
  h.kernel_overhead = stated(2e-6, "stated: start, drain and the gap to the next kernel");
  h.overlap_slowdown = stated(0.08, "stated: SMs and bandwidth taken by NCCL");
}

}  // namespace

double Hardware::peak_flops(const std::string& precision) const {
  const auto it = peak.find(precision);
  return it == peak.end() ? 0.0 : it->second;
}

Hardware hardware_from_datasheet(const ClusterSpec& c) {
  Hardware h;
  h.name = c.gpu.name;
  h.source = "datasheet of " + c.gpu.name + " with stated efficiencies, uncalibrated";
  for (const auto& [precision, flops] : c.gpu.flops) h.peak[precision] = flops.value;
  h.memory_bandwidth = c.gpu.memory_bandwidth.value;
  if (c.gpu.is_cpu) cpu_defaults(h, c);
  else gpu_defaults(h, c);
  return h;
}

Result<ClusterSpec> catalogue_cluster(const std::string& gpu) {
  auto scenario = load_scenario_text(
      fmt::format("model: qwen2.5-0.5b\ncluster: {{gpu: {}, nodes: 1, gpus_per_node: 1}}\n", gpu), gpu);
  if (!scenario) return fail(scenario.error());
  return scenario->cluster;
}

namespace {

/// `h` has its own lines' default rates. Where those of a fitted profile are another share of its lines, so are these.
void share_links(Hardware& h, const Hardware& fitted, const Hardware& their_sheet) {
  const auto share = [](Sourced& rate, const Sourced& reached, const Sourced& line) {
    if (line.value > 0.0 && reached.value != line.value)
      rate = {rate.value * reached.value / line.value, reached.source};
  };
  share(h.intra.bandwidth, fitted.intra.bandwidth, their_sheet.intra.bandwidth);
  share(h.inter.bandwidth, fitted.inter.bandwidth, their_sheet.inter.bandwidth);
  share(h.host_bandwidth, fitted.host_bandwidth, their_sheet.host_bandwidth);
}

/// What chips of one architecture share: the parts of their rates that kernels reach, and how kernels start. Rates,
/// SMs, and what a switch or a host adds, are the chip's own; links reach the same share of their line.
void inherit(Hardware& h, const Hardware& fitted, const Hardware& their_sheet) {
  h.memory_efficiency = fitted.memory_efficiency;
  h.gemm.efficiency = fitted.gemm.efficiency;
  h.gemm.half_k = fitted.gemm.half_k;
  h.attention = fitted.attention;
  h.launch = fitted.launch;
  h.kernel_overhead = fitted.kernel_overhead;
  h.overlap_slowdown = fitted.overlap_slowdown;
  h.sustained_clock = fitted.sustained_clock;
  share_links(h, fitted, their_sheet);
}

/// Of the catalogue's profiles the one that lists the GPU among its siblings.
Result<std::optional<Hardware>> from_sibling(const ClusterSpec& c, const std::filesystem::path& profiles) {
  std::vector<std::filesystem::path> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(profiles, ignored))
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& file : files) {
    auto fitted = read_hardware(file, c);
    if (!fitted) return fail(fitted.error());
    if (std::find(fitted->siblings.begin(), fitted->siblings.end(), c.gpu.name) == fitted->siblings.end()) continue;
    const auto theirs = catalogue_cluster(fitted->name);
    if (!theirs) return fail(theirs.error());
    fitted = read_hardware(file, *theirs);
    if (!fitted) return fail(fitted.error());
    Hardware h = hardware_from_datasheet(c);
    inherit(h, *fitted, hardware_from_datasheet(*theirs));
    h.source = fmt::format("datasheet of {} with the efficiencies of its sibling {}, uncalibrated ({} is {})",
                           c.gpu.name, fitted->name, fitted->name, fitted->source);
    return std::optional<Hardware>(std::move(h));
  }
  return std::optional<Hardware>();
}

/// A chip's own profile. What it states of a link holds for the catalogue's line: of another one in the scenario the
/// same share is reached.
Result<Hardware> from_own(const std::filesystem::path& profile, const ClusterSpec& c) {
  auto h = read_hardware(profile, c);
  const Hardware sheet = hardware_from_datasheet(c);
  if (!h || (h->intra.bandwidth == sheet.intra.bandwidth && h->inter.bandwidth == sheet.inter.bandwidth &&
             h->host_bandwidth == sheet.host_bandwidth))
    return h;  // it states no link: these are the scenario's already
  const auto usual = catalogue_cluster(c.gpu.name);
  if (!usual) return fail(usual.error());
  const auto fitted = read_hardware(profile, *usual);
  if (!fitted) return fail(fitted.error());
  h->intra.bandwidth = sheet.intra.bandwidth;
  h->inter.bandwidth = sheet.inter.bandwidth;
  h->host_bandwidth = sheet.host_bandwidth;
  share_links(*h, *fitted, hardware_from_datasheet(*usual));
  return h;
}

}  // namespace

Result<Hardware> hardware_for(const ClusterSpec& c, const std::filesystem::path& catalogue) {
  const std::filesystem::path profiles = catalogue / "profiles";
  std::error_code ignored;
  if (!c.calibration.empty()) {
    const std::filesystem::path named = profiles / (c.calibration + ".yaml");
    const bool of_catalogue = std::filesystem::exists(named, ignored);
    const std::filesystem::path file = of_catalogue ? named : std::filesystem::path(c.calibration);
    auto h = read_hardware(file, c);
    if (h && h->source.starts_with("the driver's double") && !file.string().ends_with(".double.yaml"))
      return fail(Diagnostic{
          .code = "E267",
          .message = "the profile was taken on the driver's double, whose times are an interpreter's",
          .where = {file.string()},
          .notes = {"source: " + h->source},
          .help = "calibrate on a GPU (--backend cuda); to try the logic all the same, name the file *.double.yaml"});
    // A file of the user's own is of the machine that it was made on; the catalogue's say of which GPUs they are.
    if (h && of_catalogue && h->name != c.gpu.name && std::ranges::find(h->gpus, c.gpu.name) == h->gpus.end()) {
      h->calibrated = false;
      h->source = fmt::format("{} on its own rates with what was fitted on {}, uncalibrated ({})", c.gpu.name,
                              h->gpus.empty() ? h->name : fmt::format("{}", fmt::join(h->gpus, ", ")), h->source);
    }
    return h;
  }
  const std::filesystem::path own = profiles / (c.gpu.name + ".yaml");
  if (c.gpu.name.empty()) return hardware_from_datasheet(c);
  if (std::filesystem::exists(own, ignored)) return from_own(own, c);
  if (c.gpu.is_cpu) return hardware_from_datasheet(c);
  auto sibling = from_sibling(c, profiles);
  if (!sibling) return fail(sibling.error());
  return *sibling ? std::move(**sibling) : hardware_from_datasheet(c);
}

}  // namespace hotbunk
