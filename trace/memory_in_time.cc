#include "trace/memory_in_time.h"

#include <algorithm>
#include <tuple>

namespace hotbunk {

std::vector<MemoryEvent> memory_in_time(const Trace& trace) {
  std::vector<MemoryEvent> out = trace.memory_events;
  std::ranges::stable_sort(out, [](const MemoryEvent& a, const MemoryEvent& b) {
    return std::tie(a.rank, a.time_ns) < std::tie(b.rank, b.time_ns);
  });
  return out;
}

}  // namespace hotbunk
