// Memory events in the order of time. A trace has them in program order, which is what live bytes are summed over (P1);
// streams overlap, so pictures of memory over time need the other one.
#pragma once
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// By rank, then by time; what happens at one moment in program order.
std::vector<MemoryEvent> memory_in_time(const Trace&);

}  // namespace hotbunk
