// How one rank of a plan talks to the others: a communicator per group family and stream, and what went through them.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/op_call.h"
#include "trace/folds.h"

namespace hotbunk {

/// Whether some rank reads another one's memory in place (peer_copy).
bool reads_peers(const Plan&);

/// `bytes` from there as the host reads them, which last until the next call: where they lie, or, of a device, a copy
/// behind what its stream has done so far.
using ReadRows = std::function<const std::byte*(const std::byte* from, std::int64_t bytes)>;

class PlanCommunicators {
 public:
  /// Makes the communicator of these world ranks, in group order, for one stream.
  using Make =
      std::function<std::unique_ptr<Communicator>(std::span<const int> ranks, const std::string& name, StreamId)>;
  /// A box of a peer copy, from there: this rank's own address, or a peer's.
  using CopyBox = std::function<void(const std::byte* from, const Box&)>;
  /// Where a peer (world rank) keeps the `bytes` that lie so many bytes from its device arena's base.
  using PeerAddress = std::function<const std::byte*(int peer, std::int64_t offset, std::int64_t bytes)>;

  /// One communicator per family and stream that any program uses, made in the same order by every rank, at the same
  /// time. `scope` begins their names; span_steps: TrafficFold.
  PlanCommunicators(const Plan&, Rank, std::int32_t span_steps, const std::string& scope, const Make&);

  /// Both run on the thread of op.stream; the traffic is counted under the phase. `read`: what ranks say of rows of
  /// experts.
  void collective(
      const OpCall&, std::int16_t phase,
      const ReadRows& read = [](const std::byte* from, std::int64_t) { return from; });
  /// Strided reads of peers' memory: the same-named buffer of each peer, wherever its own program put it. Returns the
  /// bytes that came from others.
  std::int64_t peer_copy(const OpCall&, std::int16_t phase, const PeerAddress&, const CopyBox&);
  /// What was counted since the last call goes into the books, as that step's; while no stream works.
  void fold_traffic(std::int32_t step);
  const TrafficFold& traffic() const { return traffic_; }

 private:
  Communicator& communicator(const Op&, std::int16_t phase);

  const Plan& plan_;
  const Rank rank_;
  std::map<std::pair<GroupId, StreamId>, std::unique_ptr<Communicator>> communicators_;
  TrafficFold traffic_;
  std::vector<std::map<std::string, const Buffer*>> peer_buffers_;  // [program] by name; only what peer_copy reads
};

}  // namespace hotbunk
