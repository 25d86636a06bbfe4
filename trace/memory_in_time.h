// Memory events in the order of time. A trace has them in program order, which is what live bytes are summed over (P1);
// streams overlap, so pictures of memory over time need the other one.
#pragma once
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// By rank, then by time; what happens at one moment in program order. A simulated event is of a whole call, at its
/// peak from its beginning on: two that overlap on two streams would count both peaks. So these stay in program order,
/// none earlier than the one before.
std::vector<MemoryEvent> memory_in_time(const Trace&);

}  // namespace hotbunk
