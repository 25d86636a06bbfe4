#include "backends/cuda/cuda_world.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "backends/cuda/naps.h"
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

CudaWorld::CudaWorld(std::shared_ptr<Context> context, const Nccl& nccl, const LaunchEnv& env,
                     const WorldOptions& options)
    : World(env, options), context_(std::move(context)), local_(std::make_shared<LocalRanks>()) {
  if (size() == 1) watch_own_device();  // another watch, at which NCCL's waits look
  nccl_ = std::make_unique<NcclRank>(nccl, watch());
  if (size() > 1) one_rank_per_device();
}

CudaWorld::~CudaWorld() {
  closing_.emplace(fmt::format("rank {}, giving communicators and context back,", rank()), options().timeout_seconds);
  if (nccl_) nccl_->close(watch().all_left());
}

void CudaWorld::one_rank_per_device() {
  CUuuid id{};
  HB_CUDA(context_->driver(), cuDeviceGetUuid(&id, context_->device()));
  const std::vector<std::string> all = gather("cuda/device", std::string(id.bytes, sizeof id.bytes));
  for (int r = 1; r < size(); ++r)
    for (int before = 0; before < r; ++before)
      if (all[static_cast<std::size_t>(r)] == all[static_cast<std::size_t>(before)])
        throw RuntimeFailure(
            fmt::format("ranks {} and {} are on one device ({}): NCCL takes one rank of each; give every rank a device "
                        "of its own, or start the run once, without torchrun, srun or mpirun: then all ranks share one",
                        before, r, context_->device_name()));
}

PeerMemory& CudaWorld::share_memory() {
  if (!peers_)
    peers_ = std::make_unique<PeerMemory>(*context_, rank(), watch(),
                                          [this](const std::string& mine) { return gather("cuda/peer_memory", mine); });
  return *peers_;
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
  if (nccl_ && group.size() > 1) {
    const int mine = static_cast<int>(me - group.begin());
    const SayToGroup say = [this, group](const std::string& key, const std::string& text) {
      return gather(key, text, group);
    };
    const std::string key = fmt::format("{}/{}", name, fmt::join(group, ","));
    if (!launch) return std::make_unique<StoreCommunicator>(key, group, mine, say);
    return std::make_unique<NcclCommunicator>(
        std::string(name), group, mine, nccl_->communicator(std::string(name), group, mine, say), *launch,
        NcclOptions{.wait_for_stream = [this, stream = launch->stream()] { synchronize(stream); },
                    .check = this->options().check_collectives ? say : SayToGroup{}});
  }
  return std::make_unique<LocalCommunicator>(std::string(name), group, static_cast<int>(me - group.begin()),
                                             local_->group(std::string(name), group, context_->driver()), watch(),
                                             stopped_, std::move(launch));
}

void CudaWorld::device_ends(bool done) {
  stopped_ = true;
  if (nccl_ && !done) nccl_->abort_all();
}

void CudaWorld::synchronize(CUstream stream) {
  const Driver& d = context_->driver();
  if (!nccl_) {
    HB_CUDA(d, cuStreamSynchronize(stream));
    return;
  }
  const auto where = [this] {
    const std::string status = watch().status_of(rank());
    return status.empty() ? "a stream's work" : "a stream's work, behind " + status;
  };
  std::optional<StallWatch::Wait> told;
  for (Naps naps;; naps.nap()) {
    const CUresult r = d.cuStreamQuery(stream);
    if (r == CUDA_SUCCESS) return;
    if (r != CUDA_ERROR_NOT_READY) check(d, r, "cuStreamQuery(stream)");
    nccl_->look(where());
    if (!told && naps.is_long())
      told.emplace(watch().stalls(), where, [this] {  // for whom, the device does not say
        std::vector<int> others;
        for (int other = 0; other < size(); ++other)
          if (other != rank()) others.push_back(other);
        return others;
      });
  }
}

}  // namespace hotbunk::cuda
