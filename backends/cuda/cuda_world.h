// The world of ranks on CUDA devices: who meets whom over what.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "backends/cuda/context.h"
#include "backends/cuda/local_communicator.h"
#include "runtime/world.h"

namespace hotbunk::cuda {

/// One rank, a thread of this process. All ranks of the world are threads of it and share one device.
class CudaWorld final : public World {
 public:
  /// A world of one rank.
  CudaWorld(std::shared_ptr<Context>, std::shared_ptr<LocalRanks>, const WorldOptions& = {});
  /// Meets the other ranks, as World does.
  CudaWorld(std::shared_ptr<Context>, std::shared_ptr<LocalRanks>, const LaunchEnv&, const WorldOptions& = {});

  const Context& context() const { return *context_; }
  LocalRanks& local() const { return *local_; }

  /// Over host memory.
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name) override;
  /// Over device memory, on a stream of this rank.
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name, CUstream);

  /// A device of this rank begins, or ends: then no stream of its waits for other ranks any longer.
  void device_begins() { stopped_ = false; }
  void device_ends() { stopped_ = true; }

 private:
  void watch_own_device();
  std::unique_ptr<Communicator> make(std::span<const int> ranks, std::string_view name, std::optional<Launcher>);

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<LocalRanks> local_;
  std::atomic<bool> stopped_ = false;
  std::optional<StallWatch::Wait> own_device_;  // of a rank that nobody else waits for
};

}  // namespace hotbunk::cuda
