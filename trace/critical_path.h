// The longest chain of ops that had to follow each other in one executed iteration: what must get faster for the
// iteration to get faster, and how much of it was waiting for something that no dependency asks for (a core, a host).
#pragma once
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

struct CriticalPath {
  struct PhaseShare {
    std::int16_t phase = 0;
    std::int64_t elapsed_ns = 0;  // from the last rank's end of the phase before to the last rank's end of this one
    std::int64_t busy_ns = 0;     // of that, the path's ops' own time
    /// In which nothing of the path ran: it waited, for something that is not an op that it depends on.
    std::int64_t waiting_ns() const { return elapsed_ns - busy_ns; }
  };
  std::int32_t step = 0;
  std::int64_t elapsed_ns = 0;        // of the step: the first rank's begin to the last one's end
  std::vector<std::size_t> spans;     // indices into Trace::spans, in order
  std::vector<std::int64_t> own_ns;   // of each: a collective's starts when its last member has come
  std::vector<std::int64_t> idle_ns;  // before each of them, since the one before or the step's begin
  std::int64_t idle_after_ns = 0;     // behind the last, to the step's end
  std::int64_t busy_ns = 0;           // the sum of own_ns; with all idle times it is elapsed_ns, to the nanosecond
  std::vector<PhaseShare> phases;     // in order of time; their elapsed_ns add up to the step's, busy_ns to busy_ns
};

/// Of one step whose spans the trace has. Edges: the order of a stream; events, from the last timed op before the
/// record to the first one after the wait; a collective starts when all members could; a phase, when the rank's phase
/// before is done. In a simulation of ranks that have a device each also time: what begins at the nanosecond at which
/// another op of the rank ends follows it, and so does a collective or a message that begins when an op of another rank
/// ends. Of spans that stand for whole runs of a block (sim/timeline.h: Detail) and lie over one another on several
/// streams the later one counts from where the other ends. A chain's length is the sum of its ops' own times, gaps left
/// out. Empty when the step has no spans.
CriticalPath critical_path(const Plan&, const Trace&, std::int32_t step);

/// {"step", "elapsed_s", "busy_s", "phases": [{"phase", "elapsed_s", "busy_s", "waiting_s"}], "ops": [{"name", "kind",
/// "times", "own_s"}], "waits": [{"name", "phase", "times", "idle_s"}]}: ops of one name but for its numbers together,
/// what lies between by what comes next, of each the fourteen that take longest. null without spans.
nlohmann::ordered_json critical_path_json(const Plan&, const Trace&, const CriticalPath&);

/// The last iteration that has spans, the warmest one: what pictures show the path of. 0 when there is none.
std::int32_t last_recorded_step(const Plan&, const Trace&);

}  // namespace hotbunk
