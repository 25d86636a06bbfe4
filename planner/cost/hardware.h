// Hardware: what a machine reaches in practice. A few physical constants, each with its source, plus measurements that
// correct the formulas where `hotbunk calibrate` has been run. Schema `hotbunk.hardware/1`: docs/planner.md.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "graph/op.h"
#include "spec/cluster.h"

namespace hotbunk {

struct Scenario;

/// One timed operation of a calibration run. `op` is an op kind ("linear", "swiglu", "all_reduce", …), "h2d", "d2h" or
/// "launch". Coordinates by class of op:
///   GEMM        (m, n, k)                         rows of x, rows of W, columns of both
///   attention   (tokens, keys per token, heads)   keys: mean number that a query sees
///   collective  (ranks, nodes, payload bytes)
///   else        (bytes moved)                     read + written, as the op catalogue counts them
struct Measurement {
  std::string op;
  DType dtype = DType::f32;
  std::array<double, 3> at{1.0, 1.0, 1.0};
  double seconds = 0.0;
};

/// Of a matrix product, alone, with what stands beside it, or of a gradient.
inline bool is_gemm(std::string_view op) { return op.starts_with("linear") || op == name_of(OpKind::fused_linear); }

/// Of memory taken or given back: map and unmap of the device's, map_host and unmap_host of the host's.
inline bool is_mapping(std::string_view op) {
  return op == "map" || op == "unmap" || op == "map_host" || op == "unmap_host";
}

/// One transport: b wire bytes over h hops take latency + h * hop_latency + b / bandwidth.
struct LinkModel {
  Sourced bandwidth;    // bytes/s one way that a large collective sustains per rank (bus bandwidth)
  Sourced latency;      // s, of starting one collective
  Sourced hop_latency;  // s, per step of a ring or level of a tree
};

/// C = A·B on one rank: peak * efficiency * tile fill * K fill, never below the bytes' time.
struct GemmModel {
  Sourced efficiency;  // fraction of the datasheet peak that the largest GEMMs reach
  Sourced half_k;      // K at which prologue and epilogue of a tile cost as much as its main loop
  Sourced units;       // SMs that tiles are spread over; 0: no wave quantisation
};

/// Which fused attention runs. FlashAttention-2 is written in Ampere's instructions: on Hopper it reaches half of what
/// the libraries' kernels (cuDNN, FlashAttention-3) do.
enum class AttentionKernel : std::uint8_t { library, flash2 };

/// Fused attention: FLOPs over the visible pairs only.
struct AttentionModel {
  Sourced forward, backward;  // fraction of the bf16 peak at long sequences; flash2's 0: as the library's
  Sourced half_keys;          // visible keys per query at which half of that is reached
};

/// One profile. Rates are of one physical device; CostModel divides them among the ranks that share it.
struct Hardware {
  std::string name;
  std::string source;                  // "datasheet + stated efficiencies", "calibrated on …"
  bool calibrated = false;             // efficiencies were fitted or measured on this very chip
  std::vector<std::string> gpus;       // that a profile is of, where its name is none
  std::vector<std::string> siblings;   // other GPUs of the architecture, which these efficiencies stand in for
  std::map<std::string, double> peak;  // FLOP/s by precision name, datasheet
  double memory_bandwidth = 0.0;       // bytes/s, datasheet
  Sourced memory_efficiency;           // fraction of it that streaming kernels reach
  GemmModel gemm;
  AttentionModel attention, flash2;  // the library's kernel, FlashAttention-2's
  // Share of the clock of a microbenchmark that the power limit leaves in work that goes on: of products and attention.
  Sourced sustained_clock{1.0, "as in the microbenchmarks"};
  LinkModel intra, inter;         // inside a node, between nodes
  Sourced nvls_gain;              // all-reduce bandwidth inside a node relative to the ring, 1: no NVLS
  bool shared_transport = false;  // ranks of a node share intra.bandwidth (host memory)
  Sourced host_bandwidth;         // bytes/s one way between device and pinned host memory
  Sourced host_latency;           // s per copy
  Sourced host_memory_bandwidth;  // bytes/s that a node's CPUs reach on their memory, all its ranks together
  Sourced map_bandwidth;          // bytes/s of giving memory to the arena or back (map, unmap)
  Sourced cores;                  // that all threads of a node's ranks share; 0: streams are hardware
  Sourced wake;                   // s until a sleeping thread works on an idle core; with cores
  Sourced thread_switch;          // s until it works on a core that another thread leaves; with cores
  Sourced call;                   // s of a rank's host thread per op, record or wait; with cores
  Sourced decision;               // s of a rank's host thread per block of a phase; with cores
  Sourced first_use;              // s more that a rank's first product of a size takes; with cores
  Sourced time_slice;             // s that a thread runs while others wait for its core; with cores
  Sourced launch;                 // s of the host's time per kernel; a floor under eager execution
  Sourced kernel_overhead;        // s that a kernel occupies the device beyond its roofline
  Sourced overlap_slowdown;       // fraction by which compute slows while a collective runs beside it
  std::int64_t measured_ranks_per_device = 1;  // ranks that worked at the same time when `measurements` were taken
  std::vector<Measurement> measurements;

  /// Peak for a precision, 0 when the device has no such products.
  double peak_flops(const std::string& precision) const;
};

/// From the datasheet numbers of a cluster and stated efficiencies; no file needed. Marked as uncalibrated.
Hardware hardware_from_datasheet(const ClusterSpec&);

/// Datasheet defaults with the keys of a profile on top. E205 with file, line and key on anything unknown or absurd.
Result<Hardware> read_hardware(const std::filesystem::path&, const ClusterSpec&);
Result<Hardware> parse_hardware(const std::string& text, const std::string& file, const ClusterSpec&);

/// A catalogue GPU's cluster of one node with one device.
Result<ClusterSpec> catalogue_cluster(const std::string& gpu);

/// The profile that a cluster names (`calibration`: catalogue name or path), else the catalogue's profile of its GPU,
/// else the efficiencies of a sibling of the same architecture on this GPU's own rates, else the datasheet. Only the
/// first two are calibrated, and of these none that says otherwise itself (`calibrated: false`). `catalogue` is the
/// folder scenarios/catalog.
Result<Hardware> hardware_for(const ClusterSpec&, const std::filesystem::path& catalogue);

/// The same for a scenario's cluster, whole: E260 where the scenario asks for products in a format that the device does
/// not have, E264 for every figure that its price needs and nobody gave.
Result<Hardware> hardware_for(const Scenario&, const std::filesystem::path& catalogue);

/// Every sourced number of a profile, by its key.
struct HardwareNumber {
  std::string key;
  Sourced* at = nullptr;
};
std::vector<HardwareNumber> numbers_of(Hardware&);

/// The profile as YAML text of schema hotbunk.hardware/1; parse_hardware reads it back.
std::string to_yaml(const Hardware&);

}  // namespace hotbunk
