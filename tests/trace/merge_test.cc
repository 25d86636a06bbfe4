#include "trace/merge.h"

#include <catch2/catch.hpp>

#include "base/check.h"
#include "tests/trace/sample.h"
#include "trace/trace_json.h"

namespace hotbunk {
namespace {

/// One rank's share of a trace, as its process would have it.
Trace part_of(const Trace& whole, Rank rank) {
  Trace part = whole;
  const auto others = [&](const auto& row) { return row.rank != rank; };
  std::erase_if(part.spans, others);
  std::erase_if(part.memory_events, others);
  std::erase_if(part.phases, others);
  std::erase_if(part.phase_totals, others);
  for (std::size_t r = 0; r < 2; ++r) {
    if (r == static_cast<std::size_t>(rank)) continue;
    part.memory[r] = {}, part.traffic[r] = {};
    if (r < part.traffic_totals.size()) part.traffic_totals[r] = {};
  }
  return part;
}

/// With something in every field.
Trace full_trace() {
  Trace trace = test::sample_trace();
  trace.players = {0, 0};
  trace.links = {{"node 0 gpu 1 nvlink out", "nvlink out", 2, 4.5e11, 1e9, 7, 6.5, 0.75}, {"spine", "spine"}};
  trace.phase_totals[0].stays.add(5, 2);
  return trace;
}

}  // namespace

TEST_CASE("the parts of two processes make the whole trace") {
  const Trace whole = test::sample_trace();
  Trace parts[] = {part_of(whole, 0), part_of(whole, 1)};
  // The second process met the names in another order.
  std::reverse(parts[1].names.begin(), parts[1].names.end());
  for (Span& s : parts[1].spans) s.name = 3 - s.name;
  for (MemoryEvent& e : parts[1].memory_events) e.name = 3 - e.name;
  CHECK(trace_to_json(merge_traces(parts), "") == trace_to_json(whole, ""));
  Trace twice[] = {whole, parts[1]};
  CHECK_THROWS_AS(merge_traces(twice), InternalError);
}

TEST_CASE("a packed trace comes back with all that it had") {
  const Trace trace = full_trace();
  const std::string packed = pack_trace(trace);
  CHECK(trace_to_json(unpack_trace(packed), "") == trace_to_json(trace, ""));
  CHECK(pack_trace(unpack_trace(packed)).size() == packed.size());
  CHECK(trace_to_json(unpack_trace(pack_trace({})), "") == trace_to_json({}, ""));

  const Trace whole = test::sample_trace();
  const std::string parts[] = {pack_trace(part_of(whole, 0)), pack_trace(part_of(whole, 1))};
  CHECK(trace_to_json(merge_traces(parts), "") == trace_to_json(whole, ""));
}

TEST_CASE("a packed trace that is cut short anywhere, too long, or another build's is refused") {
  const std::string packed = pack_trace(full_trace());
  for (std::size_t left = 0; left < packed.size(); ++left)
    CHECK_THROWS_AS(unpack_trace(std::string_view(packed).substr(0, left)), InternalError);
  CHECK_THROWS_WITH(unpack_trace(packed + '\0'), Catch::Contains("more than its fields"));
  std::string others = packed;
  others[others.find("hotbunk") + 8] = '9';
  CHECK_THROWS_WITH(unpack_trace(others), Catch::Contains("a rank's trace is of another build of hotbunk (hotbunk 9"));
}

}  // namespace hotbunk
