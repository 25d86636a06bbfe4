// The world of ranks on CUDA devices: who meets whom over what.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "backends/cuda/context.h"
#include "backends/cuda/local_communicator.h"
#include "backends/cuda/nccl_communicator.h"
#include "backends/cuda/peer_memory.h"
#include "runtime/deadline.h"
#include "runtime/world.h"

namespace hotbunk::cuda {

/// One rank. Either all ranks of the world are threads of this process and share one device (the local transport), or
/// each is a process with a device of its own (NCCL).
class CudaWorld final : public World {
 public:
  /// A world of one rank.
  CudaWorld(std::shared_ptr<Context>, std::shared_ptr<LocalRanks>, const WorldOptions& = {});
  /// Meets the other ranks, as World does.
  CudaWorld(std::shared_ptr<Context>, std::shared_ptr<LocalRanks>, const LaunchEnv&, const WorldOptions& = {});

  /// Ranks that are processes. RuntimeFailure when two of them are on one device, which NCCL refuses.
  CudaWorld(std::shared_ptr<Context>, const Nccl&, const LaunchEnv&, const WorldOptions& = {});
  ~CudaWorld() override;

  const Context& context() const { return *context_; }
  LocalRanks& local() const { return *local_; }

  /// Over host memory.
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name) override;
  /// Over device memory, on a stream of this rank.
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name, CUstream);

  /// Whether a rank's memory is not this process's.
  bool over_processes() const { return nccl_ != nullptr; }
  /// From here on the ranks, processes of one host, can read each other's arenas; from the second time on the same
  /// object. Every rank calls it at the same time. RuntimeFailure where the device's memory cannot be exported.
  PeerMemory& share_memory();
  /// Where ranks are processes: what NCCL may use of this rank's memory. nullptr elsewhere.
  RegisteredMemory* registered_memory() { return nccl_ ? &nccl_->memory() : nullptr; }

  /// Waits for a stream of this rank. Over NCCL it looks meanwhile at this rank's communicators and at who died:
  /// RuntimeFailure, with all communicators aborted.
  void synchronize(CUstream);

  /// A device of this rank begins, or ends: then no stream of its waits for other ranks any longer. `done`: nothing of
  /// it runs.
  void device_begins() { stopped_ = false; }
  void device_ends(bool done);

 private:
  void watch_own_device();
  std::unique_ptr<Communicator> make(std::span<const int> ranks, std::string_view name, std::optional<Launcher>);
  void one_rank_per_device();

  std::optional<Deadline>
      closing_;  // of what the destructor gives back: all have said goodbye, and nobody waits for it
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<LocalRanks> local_;
  std::unique_ptr<NcclRank> nccl_;     // where ranks are processes
  std::unique_ptr<PeerMemory> peers_;  // likewise, where a plan reads them
  std::atomic<bool> stopped_ = false;
  std::optional<StallWatch::Wait> own_device_;  // of a rank that nobody else waits for
};

}  // namespace hotbunk::cuda
