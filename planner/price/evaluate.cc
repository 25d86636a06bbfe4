#include "planner/price/evaluate.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <span>
#include <utility>

#include "base/check.h"
#include "layout/pipeline_turns.h"
#include "layout/shard.h"
#include "lowering/lower.h"
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

/// What a run counts as a function of its sizes: no tensor that is communicated has two dimensions of them, or begins
/// inside of one.
struct Linear {
  std::int64_t fixed = 0, per_token = 0, per_seq = 0;
  std::int64_t of(const BlockRuns& r) const { return fixed * r.runs + per_token * r.tokens + per_seq * r.seqs; }
};
/// How often each block of a pipeline's stage runs (exec/iteration_driver.h); empty: the plan has no pipeline.
using StageRuns = std::map<std::string, std::int64_t>;
StageRuns stage_runs(const Plan& plan, Rank rank, const PlanRuns& runs) {
  StageRuns out;
  const std::int32_t train = plan.phase_index(name_of(PlanPhase::train));
  const std::vector<Rank>& stages = plan.group_of("train_pp", rank);
  if (train < 0 || stages.empty()) return out;
  std::map<std::string, std::int32_t> numbers;
  for (const Block& block : plan.program(rank).phases[static_cast<std::size_t>(train)]) numbers.emplace(block.name, 0);
  const auto has = [&](std::string_view kind) {
    return std::ranges::any_of(numbers, [&](const auto& b) { return b.first.starts_with(kind); });
  };
  const StageBlocks blocks(numbers);
  const Pipeline pipeline{.stages = std::ssize(stages),
                          .chunks = blocks.chunks(),
                          .schedule = has("weights.")    ? PipelineSchedule::zero_bubble
                                      : has("exchange.") ? PipelineSchedule::one_f_one_b
                                                         : PipelineSchedule::gpipe};
  for (const auto& [name, number] : numbers)
    if (name != "begin" && name != "step") out[name] = 0;
  const auto stage = static_cast<std::size_t>(std::ranges::find(stages, rank) - stages.begin());
  std::map<std::int64_t, std::int64_t> steps;  // by their micro-batches
  for (std::int64_t step = 0; step < runs.optimizer_steps; ++step) {
    const auto before = [&](std::int64_t s) { return runs.micro_batches * s / runs.optimizer_steps; };
    ++steps[before(step + 1) - before(step)];
  }
  for (const auto& [micro_batches, times] : steps) {
    const std::vector<std::vector<StageTurn>> turns = pipeline_turns(pipeline, micro_batches);
    for (const StageTurn& t : turns[stage]) out[blocks.name_of(t)] += times;
  }
  return out;
}

/// Whether it has a rank's part of the residual stream.
bool cuts_tokens(const Op& op) {
  const auto cut = [](const Tensor& t) {
    return std::ranges::any_of(t.shape, [](const Dim& d) { return d.extent == sequence_extent; });
  };
  return std::ranges::any_of(op.inputs, cut) || std::ranges::any_of(op.outputs, cut);
}

/// Of a micro-batch's tokens, one in so many is in that part. (Where an engine's ranks have tokens of their own as
/// well, what they send is counted by all of them.)
std::int64_t sequence_ranks(const Plan& plan, Rank rank) {
  for (const Body& body : plan.program(rank).bodies)
    if (std::ranges::any_of(body.ops, cuts_tokens))
      return std::max<std::int64_t>(1, std::ssize(plan.group_of("train_tp", rank)));
  return 1;
}

/// How many ranks have as many tokens of the same sequences (Ulysses).
std::int64_t token_sharers(const Plan& plan, Rank rank) {
  return std::max<std::int64_t>(1, std::ssize(plan.group_of("ulysses", rank)));
}

/// How often a block runs, and with which sizes.
BlockRuns runs_of(const PlanRuns& runs, const StageRuns& stage, PlanPhase phase, const std::string& block) {
  const auto times = [](std::int64_t n) { return BlockRuns{n, 0, 0}; };
  const auto pass = [&](std::int64_t n) { return BlockRuns{n, n > 0 ? runs.trained_tokens : 0, 0}; };
  switch (phase) {
    case PlanPhase::rollout:
      return block == "prefill" ? runs.prefill : runs.decode;
    case PlanPhase::reference:
      return pass(runs.reference);
    case PlanPhase::old_logprobs:
      return pass(runs.old_logprobs);
    case PlanPhase::train:
      if (const auto at = stage.find(block); at != stage.end())
        return {at->second, runs.micro_batches > 0 ? runs.trained_tokens * at->second / runs.micro_batches : 0, 0};
      return block == "micro" ? pass(runs.micro_batches) : times(runs.optimizer_steps);
    case PlanPhase::checkpoint:
      return times(runs.checkpoints);
    case PlanPhase::export_:
      return times(runs.exports);
    default:
      return times(1);
  }
}

}  // namespace

PlanMemory memory_of(const Scenario& s, const Plan& plan, Rank rank) {
  const RankMemory memory = static_memory(plan, rank);
  PlanMemory out{.phases = JobPhases(s), .device = {}, .host = {}};
  out.device = space_of(plan, out.phases, memory.device);
  out.host = space_of(plan, out.phases, memory.host);
  return out;
}

namespace {

void raise(PlanPeak& to, const PlanPeak& other) {
  const std::int64_t mapped = std::max(to.mapped_bytes, other.mapped_bytes);
  if (other.bytes > to.bytes) to = other;
  to.mapped_bytes = mapped;
}
void raise(PlanSpace& to, const PlanSpace& other) {
  if (other.whole.bytes > to.whole.bytes) to.peak_phase = other.peak_phase;
  raise(to.whole, other.whole);
  for (std::size_t p = 0; p < num_plan_phases; ++p) raise(to.phases[p], other.phases[p]);
}

}  // namespace

PlanMemory memory_of(const Scenario& s, const Plan& plan) {
  PlanMemory out = memory_of(s, plan, 0);
  for (std::int32_t program = 0; program < std::ssize(plan.programs); ++program) {
    const auto rank = std::ranges::find(plan.program_of_rank, program) - plan.program_of_rank.begin();
    if (program == plan.program_of_rank[0]) continue;
    const PlanMemory other = memory_of(s, plan, static_cast<Rank>(rank));
    raise(out.device, other.device), raise(out.host, other.host);
  }
  return out;
}

std::vector<ShiftOp> shifts_of(const Scenario& s, const Plan& plan, std::size_t of_program) {
  std::vector<ShiftOp> out;
  const Program& program = plan.programs[of_program];
  for (const JobPhase& phase : JobPhases(s)) {
    const std::int32_t index = plan.phase_index(name_of(phase.phase));
    if (index < 0) continue;
    for (const Block& block : program.phases[static_cast<std::size_t>(index)])
      for (const Call& call : block.calls)
        for (const Op& op : program.bodies[static_cast<std::size_t>(call.body)].ops) {
          ShiftOp shift{.phase = phase.phase, .kind = op.kind, .every = phase.every};
          if (op.kind == OpKind::map || op.kind == OpKind::unmap)
            shift.section = program.section(op.section).name, shift.space = program.section(op.section).space,
            shift.bytes = op.map_end - op.map_begin;
          else if (plan.crosses_spaces(op) && !is_training(phase.phase)) shift.bytes = op.outputs[0].capacity_bytes();
          else continue;  // what training copies goes on beside what it computes, and has its price there
          const bool again = shift.kind == OpKind::copy && !out.empty() && out.back().kind == OpKind::copy &&
                             out.back().bytes == shift.bytes && out.back().phase == shift.phase;
          if (again) ++out.back().count;
          else out.push_back(shift);
        }
  }
  return out;
}

std::size_t most_shifted(const std::vector<std::vector<ShiftOp>>& of_stages) {
  const auto bytes = [](const std::vector<ShiftOp>& shifts) {
    std::int64_t all = 0;
    for (const ShiftOp& s : shifts) all += s.count * s.bytes;
    return all;
  };
  return static_cast<std::size_t>(std::ranges::max_element(of_stages, {}, bytes) - of_stages.begin());
}

MappedBytes mapped_bytes(const PlanMemory& memory) {
  MappedBytes out{.phases = memory.phases,
                  .device_peak = memory.device.whole.mapped_bytes,
                  .host_peak = memory.host.whole.mapped_bytes};
  for (std::size_t p = 0; p < num_plan_phases; ++p) {
    out.device[p] = memory.device.phases[p].mapped_bytes;
    out.host[p] = memory.host.phases[p].mapped_bytes;
  }
  return out;
}

JobMaps::JobMaps(const JobPhases& phases, bool keep_mapped, std::int64_t chunk, const std::vector<ShiftOp>& shifts,
                 std::int64_t kv_bytes, const PhaseBytes& need)
    : phases_(phases) {
  std::array<TransientUse, num_plan_phases> uses;
  std::size_t n = 0;
  for (const JobPhase& p : phases_)
    uses[n++] = transient_use(p, round_up(need[static_cast<std::size_t>(p.phase)], chunk));
  const std::int64_t pool = round_up(kv_bytes, chunk);
  const auto bytes_of = [&](const ShiftOp& s) { return s.section == "kv_cache" ? pool : s.bytes; };
  const auto maps_other = [](const ShiftOp& s) {  // transients are there for fewer phases
    return s.kind != OpKind::copy && s.section != "transient";
  };
  std::array<MappedBeside, num_plan_phases> beside;
  std::int64_t other = 0;
  auto at = shifts.begin();
  for (std::size_t i = 0; i < n; ++i) {
    const JobPhase& p = phases_.begin()[i];
    beside[i].most = other;
    for (; at != shifts.end() && at->phase == p.phase; ++at) {
      if (!maps_other(*at) || at->space != Space::device) continue;
      other += at->kind == OpKind::map ? bytes_of(*at) : -bytes_of(*at);
      beside[i].most = std::max(beside[i].most, other);
      if (at->kind == OpKind::unmap) beside[i].gives_back = true;
    }
    beside[i].end = other;
  }
  HB_CHECK(at == shifts.end(), "a shift of {} stands where the job has none", name_of(at->phase));
  const std::vector<TransientMap> maps =
      transient_maps(std::span(uses).first(n), std::span(beside).first(n), keep_mapped);
  shifts_.reserve(shifts.size() + n);
  std::int64_t mapped = 0;
  at = shifts.begin();
  for (std::size_t i = 0; i < n; ++i) {
    const JobPhase& p = phases_.begin()[i];
    const auto change_to = [&](std::int64_t to) {
      if (to == mapped) return;
      shifts_.push_back(
          {.phase = p.phase, .kind = to > mapped ? OpKind::map : OpKind::unmap, .bytes = std::abs(to - mapped)});
      mapped = to;
    };
    change_to(maps[i].first);
    for (; at != shifts.end() && at->phase == p.phase; ++at) {
      if (at->kind != OpKind::copy && !maps_other(*at)) continue;
      shifts_.push_back(*at);
      if (maps_other(*at)) shifts_.back().bytes = bytes_of(*at);
    }
    change_to(maps[i].last);
  }
}

MappedBytes JobMaps::mapped() const {
  MappedBytes out{.phases = phases_};
  std::int64_t device = 0, host = 0;
  auto at = shifts_.begin();
  for (const JobPhase& phase : phases_) {
    const auto p = static_cast<std::size_t>(phase.phase);
    const auto note = [&] {
      out.device[p] = std::max(out.device[p], device), out.device_peak = std::max(out.device_peak, device);
      out.host[p] = std::max(out.host[p], host), out.host_peak = std::max(out.host_peak, host);
    };
    note();
    for (; at != shifts_.end() && at->phase == phase.phase; ++at) {
      if (at->kind == OpKind::copy) continue;
      std::int64_t& bytes = at->space == Space::device ? device : host;
      bytes += at->kind == OpKind::map ? at->bytes : -at->bytes;
      note();
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
  const std::int64_t parts = sequence_ranks(plan, rank), sharers = token_sharers(plan, rank);
  const auto sizes_of = [&](std::int64_t tokens, std::int64_t of_stream, std::int64_t seqs) {
    Sizes sizes{.tokens = tokens, .seqs = seqs};
    sizes[sequence_extent] = sizes[returned_extent] = of_stream;
    sizes[gathered_extent] = tokens * sharers;
    return sizes;
  };
  const StageRuns stage = stage_runs(plan, rank, runs);
  std::vector<std::vector<Line>> of_body(program.bodies.size());
  for (std::size_t b = 0; b < program.bodies.size(); ++b)
    for (const Op& op : program.bodies[b].ops) {
      if (!is_communication(op.kind)) continue;
      const auto members = static_cast<std::int64_t>(plan.group_of(op.group, rank).size());
      if (members == 0) continue;  // others' work
      const auto count = [&](const Sizes& sizes) { return traffic_of(op, sizes, members, places); };
      // One token, or where a rank has its part of them, one in each part.
      const bool part = is_pairwise(op.kind) || cuts_tokens(op);
      const std::int64_t tokens = part ? parts : 1;
      const std::array of = {count(sizes_of(0, 0, 0)), count(sizes_of(tokens, part ? 1 : 0, 0)),
                             count(sizes_of(0, 0, 1))};
      const auto linear = [&](std::int64_t TrafficCount::*what) {
        return Linear{of[0].*what, (of[1].*what - of[0].*what) / tokens, of[2].*what - of[0].*what};
      };
      of_body[b].push_back({op.group, op.kind, linear(&TrafficCount::calls), linear(&TrafficCount::payload_bytes),
                            linear(&TrafficCount::padding_bytes)});
    }
  std::vector<PlanTraffic> out;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    const PlanPhase phase = phase_named(plan.phases[p].name);
    std::map<std::pair<GroupId, OpKind>, PlanTraffic> lines;
    for (const Block& block : program.phases[p]) {
      const BlockRuns times = runs_of(runs, stage, phase, block.name);
      for (const Call& call : block.calls)
        for (const Line& line : of_body[static_cast<std::size_t>(call.body)]) {
          PlanTraffic& t = lines[{line.group, line.op}];
          t.calls += line.calls.of(times), t.payload_bytes += line.payload.of(times);
          t.padding_bytes += line.padding.of(times);
        }
    }
    for (auto& [key, t] : lines)
      if (t.calls > 0)
        out.push_back({phase, plan.groups[static_cast<std::size_t>(key.first)].name, key.second, t.calls,
                       t.payload_bytes, t.padding_bytes});
  }
  return out;
}

}  // namespace hotbunk
