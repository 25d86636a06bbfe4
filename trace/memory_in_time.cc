#include "trace/memory_in_time.h"

#include <algorithm>
#include <tuple>

namespace hotbunk {

std::vector<MemoryEvent> memory_in_time(const Trace& trace) {
  std::vector<MemoryEvent> out = trace.memory_events;
  if (trace.source == "simulated") {
    for (std::size_t i = 1; i < out.size(); ++i)
      if (out[i].rank == out[i - 1].rank) out[i].time_ns = std::max(out[i].time_ns, out[i - 1].time_ns);
    return out;
  }
  std::ranges::stable_sort(out, [](const MemoryEvent& a, const MemoryEvent& b) {
    return std::tie(a.rank, a.time_ns) < std::tie(b.rank, b.time_ns);
  });
  return out;
}

}  // namespace hotbunk
