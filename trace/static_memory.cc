#include "trace/static_memory.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "base/parallel.h"
#include "graph/access.h"
#include "graph/section_states.h"
#include "trace/meter.h"

namespace hotbunk {
namespace {

using Observer = std::function<void(const MemoryMeter&, std::int16_t phase, const BoundOp&)>;

RankMemory walk(const Plan& plan, const Program& program, const Observer& after_op) {
  MemoryMeter meter;
  SectionStates states(program);
  for (const WalkTurn& turn : walk_turns(plan, program)) {
    std::int16_t phase = -1;
    for (const BlockVisit& visit : block_visits(plan, program, turn)) {
      if (visit.phase != phase) meter.enter(0, phase = visit.phase);
      const Block& block = program.phases[static_cast<std::size_t>(visit.phase)][static_cast<std::size_t>(visit.block)];
      if (states.skips(block)) continue;
      states.ran(block);
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind == OpKind::alloc || op->kind == OpKind::free) {
          const BoundBuffer b = op.allocated();
          meter.add_live(b.space(), b.category(), op->kind == OpKind::alloc ? b.bytes() : -b.bytes());
        } else if (op->kind == OpKind::map || op->kind == OpKind::unmap) {
          const std::int64_t bytes = op->map_end - op->map_begin;
          meter.add_mapped(op.section().space, op->kind == OpKind::map ? bytes : -bytes);
        } else {
          return;
        }
        if (after_op) after_op(meter, phase, op);
      });
    }
  }
  return meter.result();
}

std::vector<RankMemory> memory_by_program(const Plan& plan) {
  std::vector<RankMemory> out(plan.programs.size());
  in_parallel(out.size(), [&](std::size_t p) { out[p] = walk(plan, plan.programs[p], nullptr); });
  return out;
}

}  // namespace

RankMemory static_memory(const Plan& plan, Rank rank) { return walk(plan, plan.program(rank), nullptr); }

std::vector<LiveBuffer> live_at_peak(const Plan& plan, Rank rank, std::int16_t phase, Space space) {
  const Program& program = plan.program(rank);
  const RankMemory memory = static_memory(plan, rank);
  const SpaceMemory& side = space == Space::device ? memory.device : memory.host;
  const std::int64_t peak = phase < 0 ? side.peak_bytes : side.phase_peaks.at(phase).peak_bytes;
  using Live = std::set<std::tuple<const Buffer*, std::string_view>>;  // a local is another one in each call
  Live live, at_peak;
  walk(plan, program, [&](const MemoryMeter& meter, std::int16_t now, const BoundOp& op) {
    if (op->kind == OpKind::alloc) live.insert({op.allocated().buffer, op.allocated().prefix});
    if (op->kind == OpKind::free) live.erase({op.allocated().buffer, op.allocated().prefix});
    if (at_peak.empty() && (phase < 0 || phase == now) && meter.live(space) == peak) at_peak = live;
  });
  std::vector<LiveBuffer> out;
  for (const auto& [b, prefix] : at_peak)
    if (program.section(b->section).space == space)
      out.push_back({std::string(prefix) + b->name, program.section(b->section).name, b->category, b->bytes()});
  std::ranges::sort(out, [](const LiveBuffer& a, const LiveBuffer& b) {
    return std::tie(b.bytes, a.name, a.category) < std::tie(a.bytes, b.name, b.category);
  });
  return out;
}

std::string without_numbers(const std::string& name) {
  std::string out;
  bool in_number = false;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    const bool starts =
        digit && (out.empty() || out.back() == '.' || out.back() == '[' || out.back() == ' ');  // not the 4 of "fp4"
    if (starts || (digit && in_number)) {
      if (!in_number) out += '*';
      in_number = true;
    } else {
      out += c, in_number = false;
    }
  }
  return out;
}

std::vector<LiveTensors> live_tensors_at_peak(const Plan& plan, Rank rank, std::int16_t phase, Space space) {
  std::map<std::tuple<std::string, std::string, Category>, LiveTensors> alike;
  for (const LiveBuffer& b : live_at_peak(plan, rank, phase, space)) {
    std::string name = without_numbers(b.name);
    LiveTensors& sum = alike[{name, b.section, b.category}];
    sum.name = std::move(name), sum.section = b.section, sum.category = b.category;
    ++sum.buffers, sum.bytes += b.bytes;
  }
  std::vector<LiveTensors> out;
  for (auto& [key, sum] : alike) out.push_back(std::move(sum));
  std::ranges::stable_sort(out, std::greater<>(), &LiveTensors::bytes);
  return out;
}

FitReport check_fit(const Plan& plan) {
  FitReport report{.capacity_bytes = plan.device_capacity_bytes, .overhead_bytes = plan.overhead_bytes};
  const std::vector<RankMemory> by_program = memory_by_program(plan);
  const auto phase_of = [](const SpaceMemory& m) {
    std::int16_t fullest = -1;  // memory is mapped ahead of the phase that fills it
    for (const auto& [phase, peak] : m.phase_peaks)
      if (peak.mapped_peak_bytes == m.mapped_peak_bytes &&
          (fullest < 0 || peak.peak_bytes > m.phase_peaks.at(fullest).peak_bytes))
        fullest = phase;
    return fullest;
  };
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const RankMemory& m = by_program[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)])];
    if (m.device.mapped_peak_bytes > report.mapped_peak_bytes) {
      report.worst_rank = r;
      report.mapped_peak_bytes = m.device.mapped_peak_bytes;
      report.phase = phase_of(m.device);
    }
  }
  if (plan.device_capacity_bytes > 0 && report.mapped_peak_bytes + plan.overhead_bytes > plan.device_capacity_bytes)
    report.fits = false;
  for (Rank r = 0; report.fits && r < plan.num_ranks(); ++r) {
    const SpaceMemory& host =
        by_program[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)])].host;
    if (plan.host_capacity_bytes > 0 && host.mapped_peak_bytes > plan.host_capacity_bytes)
      report = {.fits = false,
                .worst_rank = r,
                .space = Space::host,
                .mapped_peak_bytes = host.mapped_peak_bytes,
                .capacity_bytes = plan.host_capacity_bytes,
                .overhead_bytes = 0,
                .phase = phase_of(host)};
  }
  return report;
}

}  // namespace hotbunk
