#include "trace/merge.h"

#include <fmt/format.h>

#include <algorithm>
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
  for (const int name : {-1, 4}) {
    Trace unnamed[] = {whole};
    unnamed[0].spans[2].name = name;
    CHECK_THROWS_WITH(merge_traces(unnamed), Catch::Contains(fmt::format("has name {} of 4", name)));
  }
}

TEST_CASE("a packed trace comes back with all that it had") {
  Trace trace = full_trace();
  Trace back = unpack_trace(pack_trace(trace));
  CHECK(back.players == trace.players);
  CHECK(back.links == trace.links);
  CHECK(back.memory == trace.memory);
  CHECK(back.traffic == trace.traffic);
  CHECK(back.traffic_totals == trace.traffic_totals);
  CHECK(trace_to_json(back, "") == trace_to_json(trace, ""));
  trace.players.clear(), back.players.clear();  // the text has nothing of ranks that others stand for
  CHECK(trace_to_json(back, "") == trace_to_json(trace, ""));
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
  CHECK_THROWS_WITH(unpack_trace(others), Catch::Contains("of another build of hotbunk (hotbunk 9"));
  const std::string parts[] = {pack_trace(part_of(test::sample_trace(), 0)), "short"};
  CHECK_THROWS_WITH(merge_traces(parts), Catch::Contains("the trace of rank 1") && Catch::Contains("cut short"));
}

}  // namespace hotbunk
