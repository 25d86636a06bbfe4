// How trainer and engine take turns on one GPU: the steps of an iteration in order, what each brings or takes away, and
// what both processes hold behind it. Bytes are the plan's, from the walk that the verifier walks; seconds the trace's.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/plan.h"
#include "trace/trace.h"

namespace hotbunk {

/// Of the two processes on a GPU, or both in one step.
enum class GpuProcess : std::uint8_t { trainer, engine, both };
std::string_view name_of(GpuProcess);
/// Whose memory a section is; both: the transients of whoever works.
GpuProcess process_of(const Section&);

/// Live bytes of one space.
struct HeldBytes {
  std::int64_t trainer = 0, engine = 0;
  std::int64_t working = 0;  // transients, of the process that works
  std::int64_t total() const { return trainer + engine + working; }
  friend bool operator==(const HeldBytes&, const HeldBytes&) = default;
};

/// A phase; of a phase of sleep and wake, a section that goes or comes.
struct TimelineStep {
  std::int16_t phase = 0;
  GpuProcess process = GpuProcess::both;
  std::string tag;  // what it is about: "weights", "kv_cache", "optimizer", "parameters", "sync", …
  /// "to host", "from host", "dropped", "mapped empty", "emptied in place"; of working memory "mapped", "unmapped",
  /// "resized"; else "works"
  std::string action;
  std::int64_t start_ns = 0;
  std::int64_t duration_ns = -1;       // -1: the trace does not say how the phase's time divides
  std::int64_t waiting_ns = -1;        // of that, for other ranks and nothing else; -1: not known of a part of a phase
  HeldBytes device, host;              // behind it
  std::int64_t peak_device_bytes = 0;  // live, at most meanwhile
  std::int64_t mapped_device_bytes = 0, mapped_host_bytes = 0;  // behind it
};

struct GpuTimeline {
  Rank rank = 0;
  std::int32_t step = 0;  // the iteration that the seconds are of: the last one with spans
  std::vector<TimelineStep> steps;
};

/// Of one rank, over an iteration with all of its phases, once memory repeats. Empty without iterations.
GpuTimeline gpu_timeline(const Plan&, const Trace&, Rank);

/// {"rank", "step", "overhead_bytes", "steps": [{"phase", "process", "tag", "action", "start", "seconds",
/// "waiting", "device_bytes": {"trainer", "engine", "working", "total", "peak", "mapped"}, "host_bytes": {"trainer",
/// "engine", "total", "mapped"}}]}; seconds and waiting null where they are not known.
nlohmann::ordered_json timeline_json(const Plan&, const GpuTimeline&);

}  // namespace hotbunk
