#include "planner/price/evaluate.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <span>
#include <utility>

#include "graph/bound.h"
#include "layout/shard.h"
#include "trace/static_memory.h"
#include "trace/traffic_rules.h"

namespace hotbunk {
namespace {

PlanSpace space_of(const Plan& plan, const JobPhases& phases, const SpaceMemory& memory) {
  PlanSpace out;
  out.whole = {memory.peak_bytes, memory.at_peak, memory.mapped_peak_bytes};
  for (const JobPhase& p : phases) {
    const auto index = static_cast<std::int16_t>(plan.phase_index(name_of(p.phase)));
    if (index == memory.peak_phase) out.peak_phase = p.phase;
    const SpaceMemory::PhasePeak& peak = memory.phase_peaks.at(index);
    out.phases[static_cast<std::size_t>(p.phase)] = {peak.peak_bytes, peak.by_category, peak.mapped_peak_bytes};
  }
  return out;
}

bool between_spaces(const Op& op) {
  return op.kind == OpKind::copy && (op.stream == StreamId::h2d || op.stream == StreamId::d2h);
}

/// Bytes of a run as a function of its sizes, which enter each at most once.
struct Linear {
  std::int64_t fixed = 0, per_token = 0, per_seq = 0;
  std::int64_t of(const BlockRuns& r) const { return fixed * r.runs + per_token * r.tokens + per_seq * r.seqs; }
  void add(const Linear& other, std::int64_t times) {
    fixed += times * other.fixed, per_token += times * other.per_token, per_seq += times * other.per_seq;
  }
};
template <class Bytes>
Linear linear(Bytes&& bytes_of) {
  Linear out{bytes_of(Sizes{}), 0, 0};
  out.per_token = bytes_of(Sizes{.tokens = 1}) - out.fixed;
  out.per_seq = bytes_of(Sizes{.seqs = 1}) - out.fixed;
  return out;
}

/// How often a block runs, and with which sizes.
BlockRuns runs_of(const PlanRuns& runs, PlanPhase phase, std::string_view block) {
  const auto times = [](std::int64_t n) { return BlockRuns{n, 0, 0}; };
  switch (phase) {
    case PlanPhase::rollout:
      return block == "prefill" ? runs.prefill : runs.decode;
    case PlanPhase::reference:
      return times(runs.reference);
    case PlanPhase::old_logprobs:
      return times(runs.old_logprobs);
    case PlanPhase::train:
      return times(block == "micro" ? runs.micro_batches : runs.optimizer_steps);
    case PlanPhase::checkpoint:
      return times(runs.checkpoints);
    case PlanPhase::export_:
      return times(runs.exports);
    default:
      return times(1);
  }
}

}  // namespace

PlanRuns one_run_each(const Scenario& s) {
  const std::int64_t slots = s.rollout.max_running_requests, prefill = s.rollout.max_prefill_tokens;
  return {.prefill = {1, prefill, std::min(slots, prefill)},
          .decode = {1, slots, slots},
          .reference = 1,
          .old_logprobs = 1,
          .micro_batches = 1,
          .optimizer_steps = 1,
          .checkpoints = 1,
          .exports = 1};
}

PlanMemory memory_of(const Scenario& s, const Plan& plan) {
  const RankMemory memory = static_memory(plan, 0);
  PlanMemory out{.phases = JobPhases(s), .device = {}, .host = {}};
  out.device = space_of(plan, out.phases, memory.device);
  out.host = space_of(plan, out.phases, memory.host);
  return out;
}

std::vector<ShiftOp> shifts_of(const Scenario& s, const Plan& plan) {
  std::vector<ShiftOp> out;
  const Program& program = plan.programs[0];
  for (const JobPhase& phase : JobPhases(s)) {
    const std::int32_t index = plan.phase_index(name_of(phase.phase));
    if (index < 0) continue;
    for (const Block& block : program.phases[static_cast<std::size_t>(index)])
      for (const Call& call : block.calls)
        for (const Op& op : program.bodies[static_cast<std::size_t>(call.body)].ops) {
          ShiftOp shift{.phase = phase.phase, .kind = op.kind, .every = phase.every};
          if (op.kind == OpKind::map || op.kind == OpKind::unmap)
            shift.section = op.section, shift.bytes = op.map_end - op.map_begin;
          else if (between_spaces(op)) shift.bytes = op.outputs[0].capacity_bytes();
          else continue;
          const bool again = shift.kind == OpKind::copy && !out.empty() && out.back().kind == OpKind::copy &&
                             out.back().bytes == shift.bytes && out.back().phase == shift.phase;
          if (again) ++out.back().count;
          else out.push_back(shift);
        }
  }
  return out;
}

PhaseBytes transients_of(const Plan& plan) {
  PhaseBytes out{};
  const Program& program = plan.programs[0];
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    std::int64_t& most = out[static_cast<std::size_t>(phase_named(plan.phases[p].name))];
    for (const Block& block : program.phases[p])
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind != OpKind::alloc) return;
        const BoundBuffer b = op.allocated();
        if (b.section() == Section::transient && b.bytes() > 0) most = std::max(most, b.offset + b.bytes());
      });
  }
  return out;
}

JobMaps::JobMaps(const Scenario& s, std::int64_t chunk, const std::vector<ShiftOp>& shifts, std::int64_t kv_bytes,
                 const PhaseBytes& need)
    : phases_(s) {
  std::array<TransientUse, num_plan_phases> uses;
  std::size_t n = 0;
  for (const JobPhase& p : phases_)
    uses[n++] = {when_of(p.phase), p.maps_transients(), round_up(need[static_cast<std::size_t>(p.phase)], chunk)};
  const bool nothing_sleeps = s.train.offload != Offload::sleep && !s.rollout.sleep;
  const std::vector<std::int64_t> level = transient_levels(std::span(uses).first(n), nothing_sleeps);
  const std::int64_t pool = round_up(kv_bytes, chunk);
  std::int64_t mapped = 0;
  auto at = shifts.begin();
  for (std::size_t i = 0; i < n; ++i) {
    const JobPhase& p = phases_.begin()[i];
    if (p.maps_transients() && level[i] != mapped) {
      shifts_.push_back({.phase = p.phase,
                         .kind = level[i] > mapped ? OpKind::map : OpKind::unmap,
                         .bytes = std::abs(level[i] - mapped)});
      mapped = level[i];
    }
    for (; at != shifts.end() && at->phase == p.phase; ++at) {
      const bool maps = at->kind != OpKind::copy;
      if (maps && at->section == Section::transient) continue;  // for fewer phases
      shifts_.push_back(*at);
      if (maps && at->section == Section::kv_cache) shifts_.back().bytes = pool;
    }
  }
}

PlanMemory JobMaps::memory() const {
  PlanMemory out{.phases = phases_, .device = {}, .host = {}};
  std::int64_t device = 0, host = 0;
  auto at = shifts_.begin();
  for (const JobPhase& p : phases_) {
    const auto note = [&](PlanSpace& space, std::int64_t bytes) {
      PlanPeak& peak = space.phases[static_cast<std::size_t>(p.phase)];
      peak.mapped_bytes = std::max(peak.mapped_bytes, bytes);
      space.whole.mapped_bytes = std::max(space.whole.mapped_bytes, bytes);
    };
    note(out.device, device), note(out.host, host);
    for (; at != shifts_.end() && at->phase == p.phase; ++at) {
      if (at->kind == OpKind::copy) continue;
      const bool on_device = space_of(at->section) == Space::device;
      (on_device ? device : host) += at->kind == OpKind::map ? at->bytes : -at->bytes;
      note(on_device ? out.device : out.host, on_device ? device : host);
    }
  }
  return out;
}

std::vector<PlanTraffic> traffic_of(const Plan& plan, Rank rank, const PlanRuns& runs) {
  const Program& program = plan.program(rank);
  const Places places = places_of(plan, rank);
  struct Line {
    GroupId group;
    OpKind op;
    Linear calls, payload, padding;
  };
  std::vector<std::vector<Line>> of_body(program.bodies.size());
  for (std::size_t b = 0; b < program.bodies.size(); ++b)
    for (const Op& op : program.bodies[b].ops) {
      if (!is_communication(op.kind)) continue;
      const auto members = static_cast<std::int64_t>(plan.group_of(op.group, rank).size());
      const auto count = [&](std::int64_t TrafficCount::*what) {
        return linear([&](const Sizes& sizes) { return traffic_of(op, sizes, members, places).*what; });
      };
      of_body[b].push_back({op.group, op.kind, count(&TrafficCount::calls), count(&TrafficCount::payload_bytes),
                            count(&TrafficCount::padding_bytes)});
    }
  std::vector<PlanTraffic> out;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    const PlanPhase phase = phase_named(plan.phases[p].name);
    std::map<std::pair<GroupId, OpKind>, PlanTraffic> lines;
    for (const Block& block : program.phases[p]) {
      const BlockRuns times = runs_of(runs, phase, block.name);
      for (const Call& call : block.calls)
        for (const Line& line : of_body[static_cast<std::size_t>(call.body)]) {
          PlanTraffic& t = lines[{line.group, line.op}];
          t.calls += line.calls.of(times), t.payload_bytes += line.payload.of(times);
          t.padding_bytes += line.padding.of(times);
        }
    }
    for (auto& [key, t] : lines)
      if (t.calls > 0)
        out.push_back({phase, static_cast<Family>(key.first), key.second, t.calls, t.payload_bytes, t.padding_bytes});
  }
  return out;
}

}  // namespace hotbunk
