#include "sim/timeline.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "graph/catalogue.h"

namespace hotbunk {

Timeline::Timeline(const Plan& plan, const TimelineOptions& options) : plan_(plan), options_(options) {
  for (Rank r = 0; r < plan.num_ranks(); ++r) ranks_.emplace_back(plan, r, KeptSteps{.head = options.last_step});
}

std::uint32_t Timeline::enter(Rank r, std::int32_t step, std::int16_t phase) {
  PhaseSpan visit;
  visit.rank = r;
  visit.step = step;
  visit.phase = phase;
  auto& visits = ranks_[static_cast<std::size_t>(r)].visits;
  visits.items.push_back(visit);
  return visits.end() - 1;
}

void Timeline::entered(Rank r, std::uint32_t visit, std::int64_t now_ns) {
  auto& visits = ranks_[static_cast<std::size_t>(r)].visits;
  if (visit <= visits.first) return;
  std::int64_t& end_ns = visits.at(visit - 1).end_ns;
  end_ns = std::max(end_ns, now_ns);
}

std::uint32_t Timeline::begin_run(Rank r, const Sizes& sizes, std::int32_t block) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  HB_CHECK(!line.visits.items.empty(), "rank {} runs an op before it entered a phase", r);
  PhaseSpan& visit = line.visits.items.back();
  ++visit.blocks;
  line.runs.items.push_back({sizes, visit.step, block, line.visits.end() - 1});
  return line.runs.end() - 1;
}

void Timeline::leave(Rank r, std::int64_t blocks) {
  auto& visits = ranks_[static_cast<std::size_t>(r)].visits.items;
  if (!visits.empty()) visits.back().blocks = std::max(visits.back().blocks, blocks);
}

void Timeline::close_visits(RankLine& line, std::uint32_t until) {
  while (line.visits.first < until) {
    PhaseSpan visit = line.visits.items.front();
    visit.start_ns = line.before_ns;
    line.before_ns = visit.end_ns = std::max(visit.end_ns, line.before_ns);
    line.stays.add(visit);
    line.visits.pop();
  }
  while (!line.runs.items.empty() && line.runs.items.front().visit < until) line.runs.pop();
}

std::int32_t Timeline::intern(std::string_view prefix, std::string_view name) {
  const auto [at, added] = index_of_parts_.try_emplace({prefix.data(), name.data()}, 0);
  if (!added) return at->second;
  const auto [in_full, is_new] =
      index_of_name_.try_emplace(std::string(prefix).append(name), static_cast<std::int32_t>(names_.size()));
  if (is_new) names_.push_back(in_full->first);
  return at->second = in_full->second;
}

std::int64_t Timeline::open_memory_event(Rank r, const BoundBuffer& buffer, std::int64_t delta_bytes) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  HB_CHECK(!line.visits.items.empty(), "rank {} allocates before it entered a phase", r);
  const PhaseSpan& visit = line.visits.items.back();
  if (!recorded(visit.step) || num_memory_events_ >= options_.max_memory_events) return -1;
  ++num_memory_events_;
  line.memory_events.push_back({r, buffer.space(), buffer.category(), visit.phase, visit.step,
                                intern(buffer.prefix, buffer.buffer->name), 0, delta_bytes});
  return static_cast<std::int64_t>(line.memory_events.size()) - 1;
}

void Timeline::finished(Rank r, StreamId stream, const BoundOp& op, std::uint32_t run_index, std::int64_t start_ns,
                        std::int64_t end_ns) {
  RankLine& line = ranks_[static_cast<std::size_t>(r)];
  HB_CHECK(run_index >= line.runs.first, "rank {}: {} '{}' ends after its phase", r, name_of(op->kind), op.name());
  const BlockRun run = line.runs.at(run_index);
  close_visits(line, run.visit);
  PhaseSpan& visit = line.visits.at(run.visit);
  visit.end_ns = std::max(visit.end_ns, end_ns);
  if (end_ns == start_ns || !recorded(run.step) || static_cast<std::int64_t>(spans_.size()) >= options_.max_spans)
    return;
  spans_.push_back({r, stream, op->kind, visit.phase, run.step, intern(op.call->name, op->name), start_ns, end_ns,
                    op_bytes(*op, run.sizes, line.places), op_flops(*op, run.sizes)});
}

void Timeline::write(Trace& trace) {
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
    return std::tie(a.rank, a.start_ns, a.stream, a.end_ns) < std::tie(b.rank, b.start_ns, b.stream, b.end_ns);
  });
  for (const Stream& s : plan_.streams) trace.streams.push_back(s.name);
  trace.names = names_;
  trace.spans = std::move(spans_);
  for (RankLine& line : ranks_) {
    close_visits(line, line.visits.end());
    line.stays.write(trace);
    trace.memory_events.insert(trace.memory_events.end(), line.memory_events.begin(), line.memory_events.end());
  }
  drop_partial_steps(trace);
}

}  // namespace hotbunk
