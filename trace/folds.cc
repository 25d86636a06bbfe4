#include "trace/folds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace hotbunk {
namespace {

/// Drops what is kept no longer, `latest` having been entered.
template <class ByStep>
void thin(ByStep& steps, const KeptSteps& kept, std::int32_t latest) {
  std::erase_if(steps, [&](const auto& row) { return !kept.keeps(row.first, latest); });
}

void add_to(TrafficCount& sum, const TrafficCount& c) {
  sum.calls += c.calls;
  sum.payload_bytes += c.payload_bytes;
  sum.padding_bytes += c.padding_bytes;
  sum.wire_bytes += c.wire_bytes;
}

}  // namespace

StayFold::StayFold(const Plan& plan, Rank rank, KeptSteps kept)
    : plan_(plan), ahead_(plan.most_steps_back(plan.role_of(rank))), kept_(kept) {
  for (std::size_t p = 0; p <= plan.phases.size(); ++p)
    totals_.push_back({rank, p < plan.phases.size() ? static_cast<std::int16_t>(p) : PhaseTotal::iteration, 0, -1, {}});
}

void StayFold::close_before(std::int32_t step) {
  while (!open_.empty() && open_.begin()->first < step) {
    const auto [closed, times] = *open_.begin();
    open_.erase(open_.begin());
    const std::int64_t ns = times.end_ns - times.begin_ns;
    totals_.back().stays.add(ns, closed);
    if (ns <= slowest_ns_) continue;
    slowest_ns_ = ns;
    slowest_ = steps_[closed];
  }
}

void StayFold::add(const PhaseSpan& stay) {
  if (stay.step > latest_) {
    latest_ = stay.step;
    close_before(latest_ - ahead_);
    thin(steps_, kept_, latest_ - ahead_);
  }
  steps_[stay.step].push_back(stay);
  PhaseTotal& total = totals_[static_cast<std::size_t>(stay.phase)];
  total.stays.add(stay.end_ns - stay.start_ns, stay.step);
  total.blocks += stay.blocks;
  if (stay.waiting_ns >= 0) total.waiting_ns = std::max<std::int64_t>(total.waiting_ns, 0) + stay.waiting_ns;
  if (plan_.phases[static_cast<std::size_t>(stay.phase)].when != When::iteration) return;
  open_.try_emplace(stay.step, Open{stay.start_ns, stay.end_ns}).first->second.end_ns = stay.end_ns;
}

const std::vector<PhaseSpan>& StayFold::rows(std::int32_t step) const {
  static const Rows none;
  const auto found = steps_.find(step);
  return found == steps_.end() ? none : found->second;
}

void StayFold::write(Trace& trace) const {
  StayFold done = *this;
  done.close_before(std::numeric_limits<std::int32_t>::max());
  for (const auto& [step, rows] : done.steps_) {
    if (!done.slowest_.empty() && done.slowest_.front().step < step &&
        !done.steps_.contains(done.slowest_.front().step)) {
      trace.phases.insert(trace.phases.end(), done.slowest_.begin(), done.slowest_.end());
      done.slowest_.clear();
    }
    trace.phases.insert(trace.phases.end(), rows.begin(), rows.end());
  }
  for (PhaseTotal& total : done.totals_)
    if (total.stays.times > 0) trace.phase_totals.push_back(std::move(total));
}

void TrafficFold::add(const TrafficKey& key, const TrafficCount& count) {
  if (key.step > latest_) {
    latest_ = key.step;
    std::erase_if(rows_, [&](const auto& row) { return !kept_.keeps(row.first.step, latest_ - ahead_); });
  }
  add_to(rows_[key], count);
  add_to(totals_[{.step = 0, .phase = key.phase, .group = key.group, .op = key.op}], count);
}

void MetricFold::Extremes::add(const Point& p) {
  if (p.value < lowest.value || std::isnan(lowest.value)) lowest = p;
  if (p.value > highest.value || (std::isnan(p.value) && !std::isnan(highest.value))) highest = p;
}

void MetricFold::add(const StepMetrics& metrics) {
  latest_ = metrics.step;
  thin(whole_, kept_, latest_);
  whole_[metrics.step] = metrics;
  while (latest_ / piece_steps_ >= KeptSteps::of_few_ranks) {  // two pieces become one
    piece_steps_ *= 2;
    std::map<std::int32_t, Piece> wider;
    for (auto& [number, piece] : pieces_)
      for (const auto& [name, e] : piece) {
        const auto [at, is_new] = wider[number / 2].try_emplace(name, e);
        if (!is_new) at->second.add(e.lowest), at->second.add(e.highest);
      }
    pieces_ = std::move(wider);
  }
  Piece& piece = pieces_[latest_ / piece_steps_];
  for (const auto& [name, value] : metrics.values) {
    const Point point{metrics.step, value};
    const auto [at, is_new] = piece.try_emplace(name, Extremes{point, point});
    if (!is_new) at->second.add(point);
  }
}

std::vector<StepMetrics> MetricFold::rows() const {
  std::map<std::int32_t, StepMetrics> rows = whole_;
  for (const auto& [number, piece] : pieces_)
    for (const auto& [name, e] : piece)
      for (const Point& p : {e.lowest, e.highest}) {
        StepMetrics& row = rows[p.step];
        row.step = p.step;
        row.values[name] = p.value;
      }
  std::vector<StepMetrics> out;
  for (auto& [step, row] : rows) out.push_back(std::move(row));
  return out;
}

void drop_partial_steps(Trace& trace) {
  std::map<std::int32_t, std::set<Rank>> ranks_of;
  std::set<Rank> ranks;
  for (const PhaseSpan& p : trace.phases) ranks_of[p.step].insert(p.rank), ranks.insert(p.rank);
  const std::int32_t latest = ranks_of.empty() ? 0 : ranks_of.rbegin()->first;
  const KeptSteps kept = KeptSteps::of(std::ssize(ranks));
  std::erase_if(trace.phases, [&](const PhaseSpan& p) {
    return ranks_of[p.step].size() < ranks.size() && !kept.keeps(p.step, latest);
  });
}

void stand_in(Trace& trace) {
  if (trace.players.empty()) return;
  const auto ranks = static_cast<Rank>(trace.players.size());
  const auto by_rank = [&](auto& rows) {  // one each
    rows.resize(trace.players.size());
    for (Rank r = 0; r < ranks; ++r)
      if (!trace.plays(r)) rows[static_cast<std::size_t>(r)] = rows[static_cast<std::size_t>(trace.player_of(r))];
  };
  by_rank(trace.memory), by_rank(trace.traffic), by_rank(trace.traffic_totals);
  const auto with_rank = [&](auto& rows) {
    auto of_players = std::exchange(rows, {});
    std::vector<std::vector<std::size_t>> of(trace.players.size());
    for (std::size_t i = 0; i < of_players.size(); ++i) of[static_cast<std::size_t>(of_players[i].rank)].push_back(i);
    for (Rank r = 0; r < ranks; ++r)
      for (const std::size_t i : of[static_cast<std::size_t>(trace.player_of(r))]) {
        rows.push_back(of_players[i]);
        rows.back().rank = r;
      }
  };
  with_rank(trace.phases), with_rank(trace.phase_totals);
}

void total_up(const Plan& plan, Trace& trace) {
  trace.phase_totals.clear();
  trace.traffic_totals.assign(trace.traffic.size(), {});
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    StayFold stays(plan, r, {});
    for (const PhaseSpan& p : trace.phases)
      if (p.rank == r) stays.add(p);
    Trace rows;
    stays.write(rows);
    trace.phase_totals.insert(trace.phase_totals.end(), rows.phase_totals.begin(), rows.phase_totals.end());
  }
  for (std::size_t r = 0; r < trace.traffic.size(); ++r) {
    TrafficFold traffic{KeptSteps{}};
    for (const auto& [key, count] : trace.traffic[r]) traffic.add(key, count);
    trace.traffic_totals[r] = traffic.totals();
  }
}

}  // namespace hotbunk
