// What one rank's device keeps of its run: when ops ran, how live memory moved, what the calling thread spent.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "graph/bound.h"
#include "graph/boxes.h"
#include "trace/folds.h"
#include "trace/trace.h"

namespace hotbunk {

class World;

/// One executed op; nanoseconds since the plan was opened.
struct TimedOp {
  BoundOp op;  // of the plan
  StreamId stream = lead_stream;
  std::int32_t step = 0;
  std::int16_t phase = 0;
  Sizes sizes;
  std::int64_t start_ns = 0, end_ns = 0;
  // With RecordOptions::measure_cpu, of its thread: without waiting for a core or for a peer.
  std::int64_t cpu_start_ns = 0, cpu_end_ns = 0;
};

/// CPU time of the calling thread between two syncs: first the driver's decision what comes next, then the calls.
struct HostStretch {
  std::int32_t step = 0;
  std::int16_t phase = 0;
  std::int64_t calls = 0;                    // that enqueue: ops, records and waits
  std::int64_t decide_ns = 0, issue_ns = 0;  // issue: without map and unmap, which are timed as ops
};

struct RecordOptions {
  std::int32_t span_steps = 2;  // iterations whose spans and memory events are kept
  bool measure_cpu = false;     // CPU time of every op and of the calling thread, two clock calls each
};

/// Everything but now() and note_op() is for the calling thread.
class DeviceRecord {
 public:
  struct Where {
    std::int32_t step = 0;
    std::int16_t phase = 0;
  };
  struct Moment {
    std::int64_t ns = 0;      // since the epoch
    std::int64_t cpu_ns = 0;  // of the thread that asks; 0 without RecordOptions::measure_cpu
  };

  DeviceRecord(const Plan&, Rank, const RecordOptions&, std::int64_t epoch_ns);

  Moment now() const;
  const Where& where() const { return where_; }
  /// Spans and memory events of the first steps only.
  bool keeps(const Where& w) const { return w.step <= span_steps_; }

  void enter(std::int32_t step, std::int16_t phase);
  void leave(std::int64_t blocks);
  /// take_trace() says when it happened: when its stream came to it, not when the program issued it.
  void note_live(StreamId, const BoundBuffer&, std::int64_t delta_bytes);
  void note_mapping(const BoundOp&, const Moment& start);
  /// A call of the device that enqueues nothing. The first call after a sync ends the driver's decision.
  void note_call();
  /// Calls that enqueue: an op that note_op() will be told of, a record, a wait.
  void note_enqueued(StreamId);
  void note_record(StreamId, EventId);
  void note_wait(StreamId, EventId);
  /// Around the wait for the streams.
  void note_sync_begins();
  void note_sync_ends();
  /// Called by the thread of that stream. bytes < 0: the catalogue's.
  void note_op(StreamId, const BoundOp&, const Where&, const Moment& start, const Sizes&, std::int64_t bytes);

  /// The same with times that are known, in nanoseconds since the epoch: of a device that has a clock of its own.
  void note_op(StreamId, const BoundOp&, const Where&, std::int64_t start_ns, std::int64_t end_ns, const Sizes&,
               std::int64_t bytes);

  /// Every timed op of the kept steps, for calibration; before take_trace.
  std::vector<TimedOp> timings() const;
  /// Likewise: what the calling thread spent, from the second phase on.
  const std::vector<HostStretch>& host_times() const { return host_times_; }
  /// This rank's stays in the phases of one of the latest two steps.
  const std::vector<PhaseSpan>& stays(std::int32_t step) const { return stays_.rows(step); }
  /// Of this rank among `ranks`; call once, when the streams are done.
  Trace take_trace(std::size_t ranks, RankMemory, const TrafficFold&);

 private:
  struct Timed {
    TimedOp op;
    std::int64_t bytes;
  };
  /// What the calling thread asked a stream for, in program order: where its memory events stand among its ops.
  struct Mark {
    enum class Kind : std::uint8_t { memory, record, wait } kind{};
    StreamId stream = lead_stream;
    std::int32_t ops_before = 0;  // of kept steps, enqueued on the stream so far
    std::int32_t what = 0;        // the event, or the index of the memory event
  };
  std::int64_t cpu_ns() const;
  std::int64_t clock_ns() const;
  void mark(Mark::Kind, StreamId, std::int32_t what);
  void time_memory_events();

  const Rank rank_;
  const Places places_;
  const std::int32_t span_steps_;
  const bool measure_cpu_;
  const std::int64_t epoch_ns_;
  Where where_;
  PhaseSpan stay_;  // the phase that the device is in
  StayFold stays_;
  std::array<std::vector<Timed>, max_streams> timed_;  // each grown by its stream's thread
  std::array<std::int32_t, max_streams> enqueued_{};   // ops of kept steps
  std::vector<Mark> marks_;                            // of kept steps
  std::vector<TimedOp> host_timed_;                    // map and unmap, which run on the calling thread
  std::vector<HostStretch> host_times_;                // with measure_cpu
  HostStretch stretch_;                                // since the last sync
  bool decided_ = false;                               // a call has come since then
  std::int64_t host_mark_ns_ = 0;  // the calling thread's CPU time at the last sync, then at the first call
  std::map<std::pair<const Buffer*, std::string_view>, std::int32_t> names_;  // of buffers in trace_
  Trace trace_;
};

/// Nanoseconds of the host's monotonic clock.
std::int64_t monotonic_ns();

/// When every rank has opened the plan; every rank of the world calls it. Ranks of one host read one clock, so their
/// spans line up when they count from one moment; other hosts' start when the plan opened there.
std::int64_t opened_ns(World&, const std::string& scope);

}  // namespace hotbunk
