// The interface that every interpreter of a plan meets. A device is one rank. Every call enqueues on a stream of the
// plan and returns; only `sync` waits. Calls come from one thread per device, in the plan's total program order.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "exec/divergence.h"
#include "exec/driver.h"
#include "graph/bound.h"
#include "trace/trace.h"

namespace hotbunk {

class Device {
 public:
  virtual ~Device() = default;
  virtual Rank rank() const = 0;
  /// What follows belongs to this step and phase (spans, counters, error messages).
  virtual void enter(std::int32_t step, std::int16_t phase) = 0;
  /// `blocks`: how many ran since enter(), which devices do not see.
  virtual void leave(std::int64_t blocks) = 0;

  virtual Status alloc(StreamId, const BoundOp&) = 0;  // at the offset the plan gives
  virtual Status free(StreamId, const BoundOp&) = 0;
  virtual Status map(StreamId, const BoundOp&) = 0;  // chunks [map_begin, map_end) of op.section
  virtual Status unmap(StreamId, const BoundOp&) = 0;
  /// Kernels, and zero, cast, copy_boxes, hash_boxes.
  virtual Status compute(StreamId, const BoundOp&, const Args&) = 0;
  /// copy (D2D, H2D, D2H), peer_copy, feed, fetch.
  virtual Status copy(StreamId, const BoundOp&, const Args&) = 0;
  virtual Status collective(StreamId, const BoundOp&, const Args&) = 0;
  virtual Status record(StreamId, EventId) = 0;
  virtual Status wait(StreamId, EventId) = 0;  // for the most recent record of that event
  /// A run of a block, call by call, op by op; ends with the first failure. A device that knows a shorter way to the
  /// same end may take it.
  virtual Status play(const Program&, const Block&, const Args&);
  /// Waits until everything enqueued is done; the first failure of any op comes back here.
  virtual Status sync() = 0;

  /// Outputs of what is enqueued from here on are looked at for NaN and infinity; `block` counts what is played.
  virtual void watch_numbers(std::int64_t /*block*/) {}
  /// The earliest of them, of all ranks. Every rank of the plan calls it, once, with nothing running.
  virtual std::optional<BadOutput> first_bad_output() { return {}; }
};

struct Capability {
  bool supported = true;
  std::string why;  // not
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Capability supports(const Op&) const = 0;
  /// The same of an op of the host's stream, which works on tensors in host memory.
  virtual Capability supports_on_host(const Op& op) const { return supports(op); }
  /// Devices for the ranks this process plays; the plan outlives them.
  virtual Result<std::vector<std::unique_ptr<Device>>> open(const Plan&, std::span<const Rank> local) = 0;
  /// What the devices did so far, all ranks this process can see. Called once, after the last sync.
  virtual Result<Trace> take_trace() = 0;
};

struct RunOptions {
  std::int32_t steps = 1;         // the last iteration, unless the Driver ends the run before
  std::vector<Rank> local_ranks;  // the ranks this process plays
  std::function<void(std::int32_t step, std::int16_t phase)> on_phase{};  // is about to begin
  std::int32_t first_step = 1;                                            // after 1: iterations before it were run
  std::function<Status(std::int32_t step)> on_step_end{};  // an iteration is done; a failure ends the run
};

/// E601: a backend does not execute this op, and why.
Diagnostic unsupported(const Op&, const Body&, const std::string& why);
/// E601: the first op of the plan that the backend does not execute.
Status check_supported(const Plan&, const Backend&);

/// The sessions (exec/session.h) of the local ranks' roles from the prologue to the epilogue's end; they ask the Driver
/// for blocks and sizes and turn each op into one Device call. A failure carries rank, phase and op. Refuses (E601) ops
/// the backend does not support.
Result<Trace> execute(const Plan&, Backend&, Driver&, const RunOptions&);

/// One op, dispatched to the Device call that its kind means; shared by execute and the tests.
Status dispatch(Device&, const BoundOp&, const Args&);

}  // namespace hotbunk
