#include "sim/timeline.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "graph/catalogue.h"

namespace hotbunk {

Timeline::Timeline(const Plan& plan, const TimelineOptions& options)
    : options_(options), ranks_(static_cast<std::size_t>(plan.num_ranks())) {}

std::uint32_t Timeline::enter(Rank r, std::int32_t step, std::int16_t phase) {
  PhaseSpan visit;
  visit.rank = r;
  visit.step = step;
  visit.phase = phase;
  std::vector<PhaseSpan>& visits = ranks_[static_cast<std::size_t>(r)].visits;
  visits.push_back(visit);
  return static_cast<std::uint32_t>(visits.size()) - 1;
}

void Timeline::entered(Rank r, std::uint32_t visit, std::int64_t now_ns) {
  if (visit == 0) return;
  std::int64_t& end_ns = ranks_[static_cast<std::size_t>(r)].visits[visit - 1].end_ns;
  end_ns = std::max(end_ns, now_ns);
}

std::uint32_t Timeline::begin_run(Rank r, const Sizes& sizes, std::int32_t block) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  HB_CHECK(!line.visits.empty(), "rank {} runs an op before it entered a phase", r);
  ++line.visits.back().blocks;
  line.runs.push_back({sizes, line.visits.back().step, block, static_cast<std::uint32_t>(line.visits.size() - 1)});
  return static_cast<std::uint32_t>(line.runs.size() - 1);
}

std::int32_t Timeline::intern(std::string_view name) {
  const auto [at, added] = name_index_.try_emplace(name, static_cast<std::int32_t>(names_.size()));
  if (added) names_.push_back(name);
  return at->second;
}

std::int64_t Timeline::open_memory_event(Rank r, const Buffer& buffer, std::int64_t delta_bytes) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  HB_CHECK(!line.visits.empty(), "rank {} allocates before it entered a phase", r);
  const PhaseSpan& visit = line.visits.back();
  if (!recorded(visit.step) || num_memory_events_ >= options_.max_memory_events) return -1;
  ++num_memory_events_;
  line.memory_events.push_back(
      {r, space_of(buffer.section), buffer.category, visit.phase, visit.step, intern(buffer.name), 0, delta_bytes});
  return static_cast<std::int64_t>(line.memory_events.size()) - 1;
}

void Timeline::finished(Rank r, StreamId stream, const Op& op, std::uint32_t run_index, std::int64_t start_ns,
                        std::int64_t end_ns) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  const BlockRun& run = line.runs[run_index];
  PhaseSpan& visit = line.visits[run.visit];
  visit.end_ns = std::max(visit.end_ns, end_ns);
  if (end_ns == start_ns || !recorded(run.step) || static_cast<std::int64_t>(spans_.size()) >= options_.max_spans)
    return;
  spans_.push_back({r, stream, op.kind, visit.phase, run.step, intern(op.name), start_ns, end_ns,
                    op_bytes(op, run.sizes), op_flops(op, run.sizes)});
}

void Timeline::write(Trace& trace) {
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
    return std::tie(a.rank, a.start_ns, a.stream, a.end_ns) < std::tie(b.rank, b.start_ns, b.stream, b.end_ns);
  });
  trace.names.assign(names_.begin(), names_.end());
  trace.spans = std::move(spans_);
  for (RankLine& line : ranks_) {
    std::int64_t before = 0;
    for (PhaseSpan& visit : line.visits) {
      visit.start_ns = before;
      before = visit.end_ns = std::max(visit.end_ns, before);
      trace.phases.push_back(visit);
    }
    trace.memory_events.insert(trace.memory_events.end(), line.memory_events.begin(), line.memory_events.end());
  }
}

}  // namespace hotbunk
