// Pending events in order of time, then of creation: integer keys make the order, and so the simulation, deterministic.
#pragma once
#include <cstdint>
#include <queue>
#include <vector>

namespace hotbunk {

struct SimEvent {
  std::int64_t time_ns;
  std::uint32_t sequence;  // of creation; may wrap, pending events are never 2^31 apart
  std::uint32_t what;      // the engine's tag and index
};
static_assert(sizeof(SimEvent) == 16);

class EventQueue {
 public:
  /// Returns the event's sequence number.
  std::uint32_t push(std::int64_t time_ns, std::uint32_t what) {
    heap_.push({time_ns, next_, what});
    return next_++;
  }
  SimEvent pop() {
    const SimEvent e = heap_.top();
    heap_.pop();
    return e;
  }
  bool empty() const { return heap_.empty(); }

 private:
  struct Later {
    bool operator()(const SimEvent& a, const SimEvent& b) const {
      if (a.time_ns != b.time_ns) return a.time_ns > b.time_ns;
      return static_cast<std::int32_t>(a.sequence - b.sequence) > 0;
    }
  };
  std::priority_queue<SimEvent, std::vector<SimEvent>, Later> heap_;
  std::uint32_t next_ = 0;
};

}  // namespace hotbunk
