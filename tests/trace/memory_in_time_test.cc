#include "trace/memory_in_time.h"

#include <catch2/catch.hpp>

namespace hotbunk {
namespace {

/// Of rank 0 on two streams that overlap: 100 bytes in [10, 30], then, issued later, 50 in [20, 25]; of rank 1 one.
Trace trace_of_two_streams(const char* source) {
  Trace t;
  t.source = source;
  const auto event = [&](Rank r, std::int64_t time_ns, std::int64_t delta_bytes) {
    t.memory_events.push_back({.rank = r, .time_ns = time_ns, .delta_bytes = delta_bytes});
  };
  event(0, 10, 100), event(0, 30, -100), event(0, 20, 50), event(0, 25, -50), event(1, 5, 7);
  return t;
}

std::vector<std::pair<std::int64_t, std::int64_t>> times_and_bytes(const Trace& t) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (const MemoryEvent& e : memory_in_time(t)) out.emplace_back(e.time_ns, e.delta_bytes);
  return out;
}

}  // namespace

TEST_CASE("measured memory events are in the order of time, ranks one after the other") {
  using Rows = std::vector<std::pair<std::int64_t, std::int64_t>>;
  CHECK(times_and_bytes(trace_of_two_streams("measured")) == Rows{{10, 100}, {20, 50}, {25, -50}, {30, -100}, {5, 7}});
}

TEST_CASE("simulated memory events stay in program order, none before the one before it") {
  using Rows = std::vector<std::pair<std::int64_t, std::int64_t>>;
  CHECK(times_and_bytes(trace_of_two_streams("simulated")) == Rows{{10, 100}, {30, -100}, {30, 50}, {30, -50}, {5, 7}});
}

}  // namespace hotbunk
