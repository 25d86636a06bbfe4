#include "backends/cuda/cuda_world.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {

CudaWorld::CudaWorld(std::shared_ptr<Context> context, std::shared_ptr<LocalRanks> local, const WorldOptions& options)
    : World(options), context_(std::move(context)), local_(std::move(local)) {
  watch_own_device();
}
CudaWorld::CudaWorld(std::shared_ptr<Context> context, std::shared_ptr<LocalRanks> local, const LaunchEnv& env,
                     const WorldOptions& options)
    : World(env, options), context_(std::move(context)), local_(std::move(local)) {
  if (size() == 1) watch_own_device();
}

/// A call of the driver that never returns, or a device that never comes to an end, holds up this rank alone.
void CudaWorld::watch_own_device() {
  watch_alone();
  own_device_.emplace(
      watch().stalls(), [] { return std::string("a call of the driver or for its device"); },
      [] { return std::vector{0}; }, std::numeric_limits<double>::infinity());
}

std::unique_ptr<Communicator> CudaWorld::communicator(std::span<const int> ranks, std::string_view name) {
  return make(ranks, name, std::nullopt);
}
std::unique_ptr<Communicator> CudaWorld::communicator(std::span<const int> ranks, std::string_view name,
                                                      CUstream stream) {
  return make(ranks, name, Launcher(*context_, stream));
}

std::unique_ptr<Communicator> CudaWorld::make(std::span<const int> ranks, std::string_view name,
                                              std::optional<Launcher> launch) {
  const std::vector<int> group(ranks.begin(), ranks.end());
  const auto me = std::find(group.begin(), group.end(), rank());
  HB_CHECK(me != group.end(), "rank {} is not in group {} (ranks {})", rank(), name, fmt::join(group, ", "));
  return std::make_unique<LocalCommunicator>(std::string(name), group, static_cast<int>(me - group.begin()),
                                             local_->group(std::string(name), group, context_->driver()), watch(),
                                             stopped_, std::move(launch));
}

}  // namespace hotbunk::cuda
