// Memory events have the times of the streams that use the buffers: in the order of time, buffers that are alive
// together have no byte in common, though streams overlap. Measured and simulated.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "graph/bound.h"
#include "tests/parity/harness.h"
#include "trace/memory_in_time.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

struct BufferRange {
  SectionId section{};
  std::int64_t begin = 0, bytes = 0;
  friend auto operator<=>(const BufferRange&, const BufferRange&) = default;
};

/// Where the buffers of a program lie; without those of which several have one name.
std::map<std::string, BufferRange> places_by_name(const Program& program) {
  std::map<std::string, std::set<BufferRange>> all;
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks)
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind != OpKind::alloc) return;
        const BoundBuffer b = op.allocated();
        all[b.name()].insert({b.section(), b.offset, b.bytes()});
      });
  std::map<std::string, BufferRange> out;
  for (const auto& [name, places] : all)
    if (places.size() == 1) out.emplace(name, *places.begin());
  return out;
}

struct SeenMemory {
  std::int64_t events = 0, known = 0, out_of_order = 0;
  std::string bad;
};

SeenMemory look(const Plan& plan, const Trace& trace) {
  SeenMemory out;
  for (std::size_t i = 1; i < trace.memory_events.size(); ++i) {
    const MemoryEvent &before = trace.memory_events[i - 1], &e = trace.memory_events[i];
    if (before.rank == e.rank && before.time_ns > e.time_ns) ++out.out_of_order;
  }
  std::map<Rank, std::map<std::string, BufferRange>> places;
  std::map<Rank, std::map<std::string, BufferRange>> live;
  for (const MemoryEvent& e : memory_in_time(trace)) {
    ++out.events;
    auto [mine, is_new] = places.try_emplace(e.rank);
    if (is_new) mine->second = places_by_name(plan.program(e.rank));
    const std::string& name = trace.names[static_cast<std::size_t>(e.name)];
    const auto at = mine->second.find(name);
    if (at == mine->second.end() || e.delta_bytes == 0) continue;
    ++out.known;
    auto& here = live[e.rank];
    if (e.delta_bytes < 0) {
      if (here.erase(name) == 0 && out.bad.empty())
        out.bad = fmt::format("rank {} frees {} before it comes", e.rank, name);
      continue;
    }
    for (const auto& [other, p] : here)
      if (out.bad.empty() && p.section == at->second.section && p.begin < at->second.begin + at->second.bytes &&
          at->second.begin < p.begin + p.bytes)
        out.bad = fmt::format("rank {}: {} comes while {} is there", e.rank, name, other);
    here.emplace(name, at->second);
  }
  return out;
}

std::string times_are_the_streams(const Outcome& o) {
  const auto simulated = simulate(o, o.plan);
  if (!simulated) return render(simulated.error());
  for (const Trace* trace : {&o.measured, &*simulated}) {
    const SeenMemory seen = look(o.plan, *trace);
    if (!seen.bad.empty()) return fmt::format("{}: {}", trace->source, seen.bad);
    if (seen.known * 2 < seen.events)
      return fmt::format("only {} of {} events name one buffer", seen.known, seen.events);
    if (seen.out_of_order == 0) return trace->source + ": every event is in program order, so streams say nothing here";
  }
  return "";
}

}  // namespace

TEST_CASE("in the order of time buffers that are alive together have no byte in common") {
  const Scenario sharded = tiny_scenario(4, 2, {"steps=2"});
  const Scenario pipeline =
      tiny_scenario(4, 2, {"steps=2", "train.layout.dp=2", "train.layout.pp=2", "train.pipeline_split=[2, 1]"});
  CHECK(run_cases(4, {{"fsdp2", sharded}, {"pipeline", pipeline}}, times_are_the_streams) == "");
}
