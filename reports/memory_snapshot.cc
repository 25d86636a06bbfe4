#include "reports/memory_snapshot.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/check.h"
#include "trace/memory_in_time.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t arena_base = 0x7f00'0000'0000;  // any: far from 0, below 2^47
constexpr std::int64_t section_alignment = std::int64_t{1} << 21;

/// Where a program's buffers stand in one rank's address space.
class Addresses {
 public:
  explicit Addresses(const Program& program) {
    std::int64_t next = arena_base;
    for (const Section& s : program.sections) {
      base_.push_back(next);
      if (s.space == Space::device) next += (s.bytes + section_alignment - 1) / section_alignment * section_alignment;
    }
    for (const Buffer& b : program.buffers) of_.try_emplace(b.name, base(b.section) + b.offset);
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        for (const Call& call : block.calls)
          for (std::size_t i = 0; i < call.locals.size(); ++i)
            of_.try_emplace(call.name + program.bodies[static_cast<std::size_t>(call.body)].locals[i].name,
                            base(transient_section) + call.locals[i]);
  }
  std::int64_t base(SectionId section) const { return base_[static_cast<std::size_t>(section)]; }
  bool knows(const std::string& buffer) const { return of_.contains(buffer); }
  std::int64_t of(const std::string& buffer) const {
    const auto it = of_.find(buffer);
    HB_CHECK(it != of_.end(), "a memory event names '{}', which the plan has not", buffer);
    return it->second;
  }

 private:
  std::vector<std::int64_t> base_;                    // by section
  std::unordered_map<std::string, std::int64_t> of_;  // by name
};

struct LiveBlock {
  std::int64_t bytes = 0;
  Json frames;
};
using LiveBlocks = std::map<std::int64_t, LiveBlock>;  // by address

Json entry(const char* action, std::int64_t address, std::int64_t bytes, std::int64_t time_ns, const Json& frames) {
  return {{"action", action}, {"addr", address},           {"size", bytes},
          {"stream", 0},      {"time_us", time_ns / 1000}, {"frames", frames}};
}

/// `events`: the trace's, in time.
Json events_of(const Plan& plan, const Trace& trace, const std::vector<MemoryEvent>& events, Rank rank,
               const Addresses& addresses, LiveBlocks& live) {
  Json out = Json::array();
  for (const MemoryEvent& e : events) {
    if (e.rank != rank || e.space != Space::device || e.delta_bytes == 0) continue;
    const std::string& name = trace.names[static_cast<std::size_t>(e.name)];
    const std::int64_t address = addresses.of(name);
    const Json frames = Json::array({{{"filename", plan.phases[static_cast<std::size_t>(e.phase)].name},
                                      {"line", e.step},
                                      {"name", fmt::format("{} [{}]", name, name_of(e.category))}}});
    if (e.delta_bytes > 0) {
      out.push_back(entry("alloc", address, e.delta_bytes, e.time_ns, frames));
      live[address] = {e.delta_bytes, frames};
    } else {
      out.push_back(entry("free_requested", address, -e.delta_bytes, e.time_ns, frames));
      out.push_back(entry("free_completed", address, -e.delta_bytes, e.time_ns, frames));
      live.erase(address);
    }
  }
  return out;
}

Json block(std::int64_t address, std::int64_t bytes, const char* state, const Json& frames) {
  return {{"address", address}, {"size", bytes}, {"requested_size", bytes}, {"state", state}, {"frames", frames}};
}

Json segment_of(Rank rank, std::int64_t base, std::int64_t bytes, const LiveBlocks& live) {
  Json blocks = Json::array();
  std::int64_t at = base, allocated = 0;
  for (auto it = live.lower_bound(base); it != live.end() && it->first < base + bytes; ++it) {
    if (it->first > at) blocks.push_back(block(at, it->first - at, "inactive", Json::array()));
    blocks.push_back(block(it->first, it->second.bytes, "active_allocated", it->second.frames));
    allocated += it->second.bytes;
    at = it->first + it->second.bytes;
  }
  if (at < base + bytes) blocks.push_back(block(at, base + bytes - at, "inactive", Json::array()));
  return {{"device", rank},
          {"address", base},
          {"total_size", bytes},
          {"allocated_size", allocated},
          {"active_size", allocated},
          {"requested_size", allocated},
          {"stream", 0},
          {"segment_type", "large"},
          {"segment_pool_id", {0, 0}},
          {"is_expandable", true},
          {"frames", Json::array()},
          {"blocks", blocks}};
}

}  // namespace

std::vector<Rank> ranks_with_buffers(const Plan& plan, const Trace& trace) {
  std::vector<Rank> out;
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    if (!trace.plays(r)) continue;
    const Addresses addresses(plan.program(r));
    const bool all = std::ranges::all_of(trace.memory_events, [&](const MemoryEvent& e) {
      return e.rank != r || addresses.knows(trace.names[static_cast<std::size_t>(e.name)]);
    });
    if (all) out.push_back(r);
  }
  return out;
}

Json memory_snapshot(const Plan& plan, const Trace& trace) {
  const std::vector<Rank> known = ranks_with_buffers(plan, trace);
  const std::vector<MemoryEvent> events = memory_in_time(trace);
  Json segments = Json::array(), traces = Json::array();
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const Program& program = plan.program(r);
    const Addresses addresses(program);
    LiveBlocks live;
    const bool has_events = std::ranges::binary_search(known, r);
    traces.push_back(has_events ? events_of(plan, trace, events, r, addresses, live) : Json::array());
    if (!has_events) continue;
    for (std::size_t i = 0; i < program.sections.size(); ++i) {
      const Section& s = program.sections[i];
      if (s.bytes > 0 && s.space == Space::device)
        segments.push_back(segment_of(r, addresses.base(static_cast<SectionId>(i)), s.bytes, live));
    }
  }
  return {{"segments", segments}, {"device_traces", traces}};
}

}  // namespace hotbunk
