// The checked mode's witness of order: which accesses of one rank's memory happen before which, as its streams are
// asked to run them. A race is named although nothing went wrong this time: what is compared is what events order, not
// when threads ran.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "exec/driver.h"
#include "graph/conflicts.h"

namespace hotbunk {

/// A vector clock per stream: of each stream, the last op that is known to be done before what comes next. Clocks
/// travel through record and wait, and a synchronisation with the host joins them all. Other ranks' reads of this
/// rank's memory (peer_copy) are ordered by barriers that name the tensor, and so are the reads of the same tensor
/// here. All calls come from the device's calling thread, in program order. Memory: what a plan does between two
/// synchronisations; behind one everything is known to every stream, and forgotten.
class AccessOrder {
 public:
  AccessOrder(const Plan&, const Program&);

  void record(StreamId, EventId);
  void wait(StreamId, EventId);
  /// Every stream has ended.
  void join();
  /// Notes what the op reads and writes with this run's sizes (a window's actual rows). The first conflicting access
  /// that nothing orders before it, or nothing: "stream reduce: add 'x' ... and stream compute: ...", with buffers and
  /// bytes.
  std::optional<std::string> touch(const BoundOp&, const Sizes&);

 private:
  std::string describe(const BoundOp& earlier, const BoundOp& later, const Access&) const;

  const Plan& plan_;
  const std::size_t num_events_;
  ConflictMap conflicts_;
  std::array<Clock, max_streams> clocks_;
  std::vector<Clock> recorded_;   // by event
  std::vector<BoundOp> touched_;  // since the last join, by sequence number
};

/// Calls visit(access) for what an op reads and writes with actual sizes; each_access (graph/access.h) has capacities.
template <class F>
void each_actual_access(const BoundOp& op, const Sizes& sizes, F&& visit) {
  const auto side = [&](const std::vector<Tensor>& tensors, bool write) {
    for (const Tensor& t : tensors) {
      const std::int64_t begin = op.begin_of(t);
      visit(Access{op.buffer(t).section(), begin, begin + t.bytes(sizes), write});
    }
  };
  side(op->inputs, false);
  side(op->outputs, true);
}

}  // namespace hotbunk
