#include "trace/gpu_timeline.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "graph/access.h"
#include "graph/section_states.h"
#include "lowering/phases.h"
#include "trace/critical_path.h"
#include "trace/span_name.h"

namespace hotbunk {
namespace {

using SectionBytes = std::array<std::int64_t, max_sections>;

/// What is alive and mapped by section while a program is walked.
struct Held {
  SectionBytes live{}, mapped{};

  void play(const BoundOp& op) {
    if (op->kind == OpKind::alloc || op->kind == OpKind::free) {
      const BoundBuffer b = op.allocated();
      live[static_cast<std::size_t>(b.section())] += op->kind == OpKind::alloc ? b.bytes() : -b.bytes();
    } else if (op->kind == OpKind::map || op->kind == OpKind::unmap) {
      const std::int64_t bytes = op->map_end - op->map_begin;
      mapped[static_cast<std::size_t>(op->section)] += op->kind == OpKind::map ? bytes : -bytes;
    }
  }
  HeldBytes held(const Program& program, Space space) const {
    HeldBytes out;
    for (std::size_t s = 0; s < program.sections.size(); ++s) {
      const Section& section = program.sections[s];
      if (section.space != space) continue;
      const GpuProcess process = process_of(section);
      (process == GpuProcess::trainer  ? out.trainer
       : process == GpuProcess::engine ? out.engine
                                       : out.working) += live[s];
    }
    return out;
  }
  static std::int64_t sum(const Program& program, Space space, const SectionBytes& bytes) {
    std::int64_t out = 0;
    for (std::size_t s = 0; s < program.sections.size(); ++s)
      if (program.sections[s].space == space) out += bytes[s];
    return out;
  }
};

/// What a section holds, in one word.
std::string tag_of(const Section& s) {
  if (s.name == "rollout_weights") return "weights";
  if (s.name == "train_params") return "parameters";
  if (s.name.starts_with("train_")) return s.name.substr(6);
  return s.name;
}

GpuProcess process_of_phase(PlanPhase p) {
  switch (p) {
    case PlanPhase::start_rollout:
    case PlanPhase::wake_rollout:
    case PlanPhase::flush:
    case PlanPhase::wake_kv:
    case PlanPhase::rollout:
    case PlanPhase::sleep_rollout:
    case PlanPhase::sleep_kv:
    case PlanPhase::sleep_weights:
    case PlanPhase::exchange:
      return GpuProcess::engine;
    case PlanPhase::sync:
    case PlanPhase::samples:
    case PlanPhase::framework:
      return GpuProcess::both;
    default:
      return GpuProcess::trainer;
  }
}

/// What the steps of one walk of an iteration are, and which spans are theirs.
struct Walked {
  std::vector<TimelineStep> steps;
  std::vector<std::set<std::string>> spans;  // by step: what its ops' spans are called
};

class Walker {
 public:
  Walker(const Plan& plan, Rank rank) : plan_(plan), program_(plan.program(rank)), states_(program_) {}

  Walked last_iteration() {
    Walked out;
    for (const WalkTurn& turn : walk_turns(plan_, program_)) {
      Walked walked = walk(turn);
      if (turn.when == When::iteration && walked.steps.size() >= out.steps.size()) out = std::move(walked);
    }
    return out;
  }

 private:
  Walked walk(const WalkTurn& turn) {
    Walked out;
    for (const BlockVisit& visit : block_visits(plan_, program_, turn)) {
      const Block& block = block_at(program_, visit);
      if (states_.skips(block)) continue;
      states_.ran(block);
      const bool moves = block.enters != Enters::nothing;
      if (does_nothing(block)) continue;
      if (out.steps.empty() || moves || out.steps.back().phase != visit.phase) {
        out.steps.push_back(step_of(visit.phase, block));
        out.spans.emplace_back();
      }
      TimelineStep& step = out.steps.back();
      std::set<std::string>& spans = out.spans.back();
      spans.insert(block.name);
      bool only_maps = !moves, maps = false, unmaps = false;
      each_op(program_, block, [&](const BoundOp& op) {
        held_.play(op);
        step.peak_device_bytes = std::max(step.peak_device_bytes, Held::sum(program_, Space::device, held_.live));
        if (!plan_.phases[static_cast<std::size_t>(visit.phase)].driven && op->kind != OpKind::alloc &&
            op->kind != OpKind::free)
          spans.insert(span_name(op)), spans.insert(op.name_with_neighbours());
        maps |= op->kind == OpKind::map, unmaps |= op->kind == OpKind::unmap;
        if (op->kind != OpKind::map && op->kind != OpKind::unmap) only_maps = false;
        if (moves && op->kind == OpKind::copy) step.action = block.enters == Enters::asleep ? "to host" : "from host";
      });
      step.device = held_.held(program_, Space::device), step.host = held_.held(program_, Space::host);
      step.mapped_device_bytes = Held::sum(program_, Space::device, held_.mapped);
      step.mapped_host_bytes = Held::sum(program_, Space::host, held_.mapped);
      if (only_maps)  // what the phases until then, or from then on, work in
        step.tag = "working memory", step.action = maps && unmaps ? "resized" : maps ? "mapped" : "unmapped";
    }
    return out;
  }

  /// A section that holds nothing in this plan sleeps and wakes without an op.
  bool does_nothing(const Block& block) const {
    return std::ranges::all_of(block.calls, [&](const Call& call) {
      return program_.bodies[static_cast<std::size_t>(call.body)].ops.empty();
    });
  }

  /// Before its ops are seen.
  TimelineStep step_of(std::int16_t phase, const Block& block) const {
    TimelineStep out;
    const std::string& name = plan_.phases[static_cast<std::size_t>(phase)].name;
    out.phase = phase;
    out.peak_device_bytes = Held::sum(program_, Space::device, held_.live);
    if (block.enters != Enters::nothing) {
      const Section& section = program_.section(block.section);
      out.process = process_of(section), out.tag = tag_of(section);
      out.action = block.enters == Enters::asleep ? "dropped" : "mapped empty";
      return out;
    }
    const PlanPhase known = phase_named(name);
    out.process = process_of_phase(known);
    out.tag = known == PlanPhase::flush ? "kv_cache" : name;
    out.action = known == PlanPhase::flush ? "emptied in place" : "works";
    return out;
  }

  const Plan& plan_;
  const Program& program_;
  SectionStates states_;
  Held held_;
};

/// When each step of a phase ended: with the last of its spans; the last step with the phase.
void set_times(const Trace& trace, const PhaseSpan& stay, std::span<TimelineStep> steps,
               std::span<const std::set<std::string>> names) {
  std::vector<std::int64_t> ends(steps.size(), stay.start_ns);
  bool known = true;
  if (steps.size() > 1)
    for (const Span& s : trace.spans) {
      if (s.rank != stay.rank || s.step != stay.step || s.phase != stay.phase) continue;
      const std::string& name = trace.names[static_cast<std::size_t>(s.name)];
      const auto mine = std::ranges::find_if(names, [&](const auto& of) { return of.contains(name); });
      if (mine == names.end()) known = false;
      else if (std::int64_t& end_ns = ends[static_cast<std::size_t>(mine - names.begin())]; end_ns < s.end_ns)
        end_ns = s.end_ns;
    }
  ends.back() = stay.end_ns;
  std::int64_t before_ns = stay.start_ns;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::int64_t end_ns = std::clamp(ends[i], before_ns, stay.end_ns);
    steps[i].start_ns = before_ns;
    steps[i].duration_ns = known ? end_ns - before_ns : -1;
    before_ns = end_ns;
  }
  if (steps.size() == 1) steps.front().waiting_ns = stay.waiting_ns;
}

}  // namespace

std::string_view name_of(GpuProcess p) {
  return p == GpuProcess::trainer ? "trainer" : p == GpuProcess::engine ? "engine" : "both";
}

GpuProcess process_of(const Section& s) {
  if (s.name == "rollout_weights" || s.name == "kv_cache" || s.name == "host_weights" || s.name == "graphs")
    return GpuProcess::engine;
  if (s.name.starts_with("train_") || s.name.starts_with("host_")) return GpuProcess::trainer;
  return GpuProcess::both;
}

GpuTimeline gpu_timeline(const Plan& plan, const Trace& trace, Rank rank) {
  GpuTimeline out{rank, last_recorded_step(plan, trace), {}};
  Walked walked = Walker(plan, rank).last_iteration();
  const Rank player = trace.player_of(rank);
  for (std::size_t first = 0, next = 0; first < walked.steps.size(); first = next) {
    const std::int16_t phase = walked.steps[first].phase;
    while (next < walked.steps.size() && walked.steps[next].phase == phase) ++next;
    const auto stay = std::ranges::find_if(
        trace.phases, [&](const PhaseSpan& p) { return p.rank == player && p.step == out.step && p.phase == phase; });
    if (stay != trace.phases.end())
      set_times(trace, *stay, std::span(walked.steps).subspan(first, next - first),
                std::span(walked.spans).subspan(first, next - first));
  }
  out.steps = std::move(walked.steps);
  return out;
}

nlohmann::ordered_json timeline_json(const Plan& plan, const GpuTimeline& timeline) {
  using Json = nlohmann::ordered_json;
  Json steps = Json::array();
  for (const TimelineStep& s : timeline.steps)
    steps.push_back({{"phase", plan.phases[static_cast<std::size_t>(s.phase)].name},
                     {"process", name_of(s.process)},
                     {"tag", s.tag},
                     {"action", s.action},
                     {"start", static_cast<double>(s.start_ns) * 1e-9},
                     {"seconds", s.duration_ns < 0 ? Json(nullptr) : Json(static_cast<double>(s.duration_ns) * 1e-9)},
                     {"waiting", s.waiting_ns < 0 ? Json(nullptr) : Json(static_cast<double>(s.waiting_ns) * 1e-9)},
                     {"device_bytes",
                      {{"trainer", s.device.trainer},
                       {"engine", s.device.engine},
                       {"working", s.device.working},
                       {"total", s.device.total()},
                       {"peak", s.peak_device_bytes},
                       {"mapped", s.mapped_device_bytes}}},
                     {"host_bytes",
                      {{"trainer", s.host.trainer},
                       {"engine", s.host.engine},
                       {"total", s.host.total()},
                       {"mapped", s.mapped_host_bytes}}}});
  return {{"rank", timeline.rank},
          {"step", timeline.step},
          {"overhead_bytes", plan.overhead_bytes},
          {"steps", std::move(steps)}};
}

}  // namespace hotbunk
