// The CPU backend: executes a plan in real time, one process per rank, streams as threads, arenas with a hard capacity.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cpu_gloo/cpu_world.h"
#include "backends/cpu_gloo/kernels/product_paths.h"
#include "exec/backend.h"
#include "runtime/device_record.h"
#include "runtime/rank_backend.h"

namespace hotbunk {

struct CpuOptions {
  int compute_threads = 1;                                           // OpenMP team of the compute stream
  kernels::ProductPaths product_paths = kernels::rule_of_machine();  // of bf16, alike on all ranks
  bool enforce_capacity = true;  // false only in tests of what happens then: the arena enforces it either way
  std::int32_t span_steps = 2;   // iterations whose spans and memory events are kept
  bool check_resident = false;   // P4: after every phase, resident bytes of the arena == mapped bytes to one chunk
  bool poison = false;           // fill buffers with NaN when they are allocated
  bool check_order = false;      // name accesses of the same bytes that no event orders, lucky timing or not
  bool check_finite =
      false;  // look for NaN and infinity in every op's fp32 and bf16 outputs; name the op that made them
  bool measure_cpu = false;  // calibration: CPU time of every op and of the calling thread, two clock calls each
  std::string scope;         // tells apart the plans that one world executes in turn; part of communicators' names
  std::optional<Transport> transport;  // default: shared memory on one host, else gloo
};

class Arena;

/// Plays one rank of `world` (the plan's ranks are the world's).
class CpuBackend final : public RankBackend {
 public:
  /// The driver fills feeds and takes fetches; all three outlive the devices.
  CpuBackend(CpuWorld&, Driver&, CpuOptions);
  ~CpuBackend() override;

  Capability supports(const Op&) const override;
  /// `local` is this process's rank. Creates arenas and communicators: every rank of the world calls it.
  /// E602 when memory, threads or a peer cannot be had.
  Result<std::vector<std::unique_ptr<Device>>> open(const Plan&, std::span<const Rank> local) override;
  /// Of this rank; other ranks' parts are empty (merge_traces joins them).
  Result<Trace> take_trace() override;

  /// What ran when, for calibration; before take_trace.
  std::vector<TimedOp> timings() const;
  /// Likewise, with CpuOptions::measure_cpu.
  std::vector<HostStretch> host_times() const;

  std::vector<PhaseSpan> stays(std::int32_t step) const override;
  RankMemory memory_so_far() override;

  /// The world's, which is the plan's.
  Rank rank() const { return static_cast<Rank>(world_.rank()); }
  /// Reads a buffer of this rank's arena, for tests: empty when its range is not mapped.
  std::span<const std::byte> peek(std::string_view buffer_name) const;
  /// Resident bytes of the device arena as the kernel counts them, and what is mapped.
  std::int64_t resident_bytes() const;
  std::int64_t mapped_bytes() const;
  /// The device arena, for tests that book in it what the plan does not know.
  Arena& device_arena() const { return *memory_; }

 private:
  CpuWorld& world_;
  Driver& driver_;
  CpuOptions options_;
  std::shared_ptr<Arena> memory_;      // outlives the device: the world's communicators know its addresses
  class CpuDevice* device_ = nullptr;  // owned by the caller of open()
};

}  // namespace hotbunk
