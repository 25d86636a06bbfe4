// What an op costs: the only thing the simulator asks of a cost model.
#pragma once
#include <array>
#include <cstdint>

#include "exec/driver.h"
#include "graph/plan.h"
#include "sim/run_queue.h"

namespace hotbunk {

/// A pure function. It may look at sizes only through the actual shapes of the op's tensors and, for attention kinds,
/// Sizes::attention_pairs: the simulator asks once per rank and op where those do not change.
struct OpCost {
  virtual ~OpCost() = default;
  /// Time of the op on its stream once it starts, at its rank's share of the device, >= 0. Collectives: from the moment
  /// when the last participant has arrived; each participant is asked, and the slowest answer holds for all.
  virtual std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const = 0;
  /// Ranks of different numbers may have different prices though they do and meet the same: stragglers, slow links.
  virtual std::int64_t rank_class(Rank) const { return 0; }
  /// How the ranks' threads share cores. With cores, nanoseconds() is CPU time on one core; of a collective inside a
  /// device what this rank itself spends on it.
  virtual ThreadModel threads() const { return {}; }
  /// What a rank's first op of this `key` takes more, such as a library making a kernel for a size; 0 ns: nothing.
  struct FirstUse {
    std::array<std::int64_t, 5> key{};
    std::int64_t nanoseconds = 0;
  };
  virtual FirstUse first_use(const Op&, const Args&) const { return {}; }
  /// Whether times scatter: if not, jitter() is 1 everywhere and need not be asked.
  virtual bool jitters() const { return false; }
  /// Factor >= 0 on the time of one execution of an op, mean 1. `execution` tells it from all others of this rank (of
  /// any op), and does not depend on the order in which they are asked: then the answer does not either.
  virtual double jitter(Rank, const Op&, std::uint64_t /*execution*/) const { return 1.0; }
  /// Of a rank's host thread before it starts a run of a block; counts only with threads().
  virtual std::int64_t decision_nanoseconds() const { return 0; }
};

}  // namespace hotbunk
