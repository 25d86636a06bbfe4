// Driver: decides at run time what a driven phase does next, and exchanges data with it.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/diagnostic.h"
#include "graph/bound.h"
#include "trace/trace.h"

namespace hotbunk {

/// Data that a Driver keeps alive from next() until completed(); its own type.
struct Payload {
  virtual ~Payload() = default;
};

/// One run of one block, or several like it.
struct Args {
  std::int32_t block = 0;
  std::int32_t step = 0;
  Sizes sizes;
  /// So many runs, one right behind the other, of which each has `pairs_per_time` attention_pairs more than the one
  /// before: decode steps between two events of a scheduler. Only a Driver that was told that its device takes them
  /// together says more than one.
  std::int64_t times = 1, pairs_per_time = 0;
  std::shared_ptr<Payload> payload;
};

class Driver {
 public:
  virtual ~Driver() = default;
  /// The next block of a driven phase on this rank, or nothing when the phase is done. For a phase that is not driven
  /// it is called once and must return block 0. `phase` indexes Plan::phases.
  virtual std::optional<Args> next(Rank, std::int32_t step, std::int16_t phase) = 0;
  /// Fills a feed op's destination (real backends only; on a stream's thread, after next() and before completed()): all
  /// of it where the op has moves and does not accumulate.
  virtual void feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) = 0;
  /// Whether feed() would fill the destination with zeros alone: then a backend may do so itself and not call it.
  virtual bool feeds_zeros(Rank, const BoundOp&) const { return false; }
  /// Takes a fetch op's data.
  virtual void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte> source) = 0;
  /// The block ran to its end and its fetches have arrived. Called when wants_results(), else at once after enqueueing.
  /// Throws Diverged or DriverFailure (divergence.h) when the run cannot go on.
  virtual void completed(Rank, const Args&, std::int16_t phase) = 0;
  /// The blocks of a mini-batch of the train phase, from its begin to its step, as next() gave them: to be played again
  /// when completed() threw Diverged.
  virtual std::vector<Args> mini_batch(Rank, std::int32_t /*step*/, std::int64_t /*mini*/) { return {}; }
  /// True: a block with fetch ops is synced before the next decision. False where no decision hangs on data.
  virtual bool wants_results() const = 0;
  /// An iteration's phases are done, and so is RunOptions::on_step_end. A failure ends the run.
  virtual Status step_ended(std::int32_t /*step*/) { return {}; }
  /// Asked after that: whether it is the last one, before RunOptions::steps are. All ranks must answer the same. Only
  /// asked where a plan has one role: several would have to agree before the one that is ahead has begun another.
  virtual bool ends_after(std::int32_t /*step*/) const { return false; }
  /// Figures per step, and the trained tokens, for the trace.
  virtual void report(Trace&) const = 0;
};

}  // namespace hotbunk
