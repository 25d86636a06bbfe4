// The longest chain of ops that had to follow each other in one executed iteration: what must get faster for the
// iteration to get faster, and how much of it was waiting for something that no dependency asks for (a core, a host).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

struct CriticalPath {
  struct PhaseShare {
    std::int16_t phase = 0;
    std::int64_t elapsed_ns = 0;  // from the last rank's end of the phase before to the last rank's end of this one
    std::int64_t busy_ns = 0;     // of that, the path's ops' own time
    /// What the phase waits beyond its longest chain; 0 when ranks are in different phases at a time.
    std::int64_t waiting_ns() const { return elapsed_ns > busy_ns ? elapsed_ns - busy_ns : 0; }
  };
  std::int32_t step = 0;
  std::vector<std::size_t> spans;    // indices into Trace::spans, in order
  std::vector<std::int64_t> own_ns;  // of each: a collective's starts when its last member has come
  std::int64_t busy_ns = 0;          // their sum
  std::vector<PhaseShare> phases;    // in order of time
};

/// Of one step whose spans the trace has. Edges: the order of a stream; events, from the last timed op before the
/// record to the first one after the wait; a collective starts when all members could; a phase, when the rank's phase
/// before is done. A chain's length is the sum of its ops' own times, gaps left out. Empty when the step has no spans.
CriticalPath critical_path(const Plan&, const Trace&, std::int32_t step);

/// The last iteration that has spans, the warmest one: what pictures show the path of. 0 when there is none.
std::int32_t last_recorded_step(const Plan&, const Trace&);

}  // namespace hotbunk
