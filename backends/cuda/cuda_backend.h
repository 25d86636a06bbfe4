// The CUDA backend: executes a plan on the driver's table, one thread of the process per rank, physical memory mapped
// at fixed addresses as the plan says.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/cuda_world.h"
#include "backends/cuda/dnn_attention.h"
#include "backends/cuda/products.h"
#include "graph/bound.h"
#include "runtime/rank_backend.h"

namespace hotbunk::cuda {

class CudaDevice;
class DeviceArena;

/// One run of an op: by the device's clock; of map and unmap the host's.
struct DeviceTiming {
  BoundOp op;
  Sizes sizes;
  std::int32_t step = 0;
  std::int64_t nanoseconds = 0;
};

struct CudaOptions {
  std::int32_t span_steps = 2;   // iterations whose spans and memory events are kept
  bool graphs = true;            // of what a driven phase launches again and again; false: op by op, to compare with
  bool keep_timings = false;     // of all ops of the iterations whose spans are kept
  int host_threads = 1;          // OpenMP team of what is computed on the host; have its pages, too
  bool check_order = false;      // name accesses of the same bytes that no event orders, as the plan asks for them
  std::optional<BlasLt> blas{};  // none: our kernels form all products
  ComparedProducts compared{};
  std::optional<Dnn> dnn{};  // none: our kernels form attention's gradients
  std::int64_t attention_workspace_bytes = DnnAttention::usual_workspace_bytes;
  ProductPolicy products = ProductPolicy::backward;  // which of them cuBLASLt forms, where it is
  std::string scope;  // tells apart the plans that one world executes in turn; part of communicators' names
};

/// Plays one rank of `world` (the plan's ranks are the world's).
class CudaBackend final : public RankBackend {
 public:
  /// The driver fills feeds and takes fetches; both outlive the devices.
  CudaBackend(CudaWorld&, hotbunk::Driver&, CudaOptions);
  ~CudaBackend() override;

  Capability supports(const Op&) const override;
  /// By the CPU backend's kernels.
  Capability supports_on_host(const Op&) const override;
  /// `local` is this thread's rank. Every rank of the world calls it. E602 when memory, threads
  /// or a peer cannot be had.
  Result<std::vector<std::unique_ptr<Device>>> open(const Plan&, std::span<const Rank> local) override;
  /// Of this rank; other ranks' parts are empty (merge_traces joins them).
  Result<Trace> take_trace() override;
  std::vector<PhaseSpan> stays(std::int32_t step) const override;
  RankMemory memory_so_far() override;
  std::vector<LibraryChoice> library_choices() const override { return choices_; }

  /// With keep_timings: what ran until the trace was taken, stream by stream in order.
  const std::vector<DeviceTiming>& timings() const { return timings_; }

  const Context& context() const { return world_.context(); }

  /// Bytes that the device holds for this rank's plan, and what its books call mapped.
  std::int64_t physical_bytes() const;
  std::int64_t mapped_bytes() const;
  /// A buffer of this rank's device memory, read back; empty when its range is not mapped. For tests.
  std::vector<std::byte> read(std::string_view buffer_name) const;

 private:
  CudaWorld& world_;
  hotbunk::Driver& driver_;
  CudaOptions options_;
  std::shared_ptr<DeviceArena> memory_;  // outlives the device: peers read it
  std::vector<DeviceTiming> timings_;
  std::vector<LibraryChoice> choices_;
  CudaDevice* device_ = nullptr;  // owned by the caller of open()
};

}  // namespace hotbunk::cuda
