// How one rank of a plan talks to the others: a communicator per group family and stream, and what went through them.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/op_kernels.h"
#include "trace/folds.h"

namespace hotbunk {

/// "" when every rank that the plan's peer copies read from shares memory with its reader; else why not. The same
/// answer on every rank.
std::string why_no_peer_memory(const Plan&, const CpuWorld&);

class PlanCommunicators {
 public:
  /// Every rank of the world makes its own at the same time. Peers may read `device` from here on.
  PlanCommunicators(const Plan&, Rank, CpuWorld&, const CpuOptions&, const Arena& device);

  /// Both run on the thread of op.stream; the traffic is counted under the phase.
  void collective(const KernelCall&, std::int16_t phase);
  /// Strided reads of peers' memory: the same-named buffer of each peer, wherever its own program put it. Returns the
  /// bytes that came from others.
  std::int64_t peer_copy(const KernelCall&, std::int16_t phase);
  /// What was counted since the last call goes into the books, as that step's; while no stream works.
  void fold_traffic(std::int32_t step);
  const TrafficFold& traffic() const { return traffic_; }

 private:
  Communicator& communicator(const Op&, std::int16_t phase);

  const Plan& plan_;
  const Rank rank_;
  const CpuWorld& world_;
  int region_ = -1;  // CpuWorld::share index of the device arena
  std::map<std::pair<GroupId, StreamId>, std::unique_ptr<Communicator>> communicators_;
  TrafficFold traffic_;
  std::vector<std::map<std::string, const Buffer*>> peer_buffers_;  // [program] by name; only what peer_copy reads
};

}  // namespace hotbunk
