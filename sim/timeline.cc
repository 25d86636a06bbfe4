#include "sim/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "base/check.h"
#include "graph/catalogue.h"
#include "trace/span_name.h"

namespace hotbunk {

Timeline::Timeline(const Plan& plan, const RankClasses& classes, const TimelineOptions& options)
    : plan_(plan), options_(options), line_of_rank_(classes.representatives().size(), -1) {
  constexpr std::int64_t least_share = 64;
  // A rank has so much of it for a step; its stays in driven phases, which have as many runs as the Driver wants,
  // divide that between them, the others have hardly any. Where there is no room for all ranks, the first ones take
  // half of it, and those behind them one span for each stream of a stay, as far as the other half goes.
  const std::int64_t players = std::ssize(classes.players()),
                     steps = std::max<std::int64_t>(1, options.last_step - options.first_step),
                     wanted = 4 * 2 * least_share * steps, each_stay = 3 * std::ssize(plan.phases) * steps,
                     all = std::numeric_limits<std::int64_t>::max() / 4;
  const bool fits = options.room == 0 || players * wanted <= options.room;
  const std::int64_t of_step = options.room == 0 ? all
                               : fits            ? options.room / (players * steps)
                                                 : 4 * 2 * least_share,
                     detailed = fits ? players : std::max<std::int64_t>(1, options.room / 2 / wanted),
                     drawn = detailed + options.room / 2 / each_stay;
  for (const Rank r : classes.players()) {
    const bool in_full = std::ranges::find(options.in_full, r) != options.in_full.end();
    const std::int64_t number = std::ssize(lines_);
    line_of_rank_[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(number);
    lines_.emplace_back(plan, r, KeptSteps::of(std::ssize(classes.players()), options.last_step),
                        in_full             ? all
                        : number < detailed ? of_step
                        : number < drawn    ? 0
                                            : unrecorded);
  }
  driven_behind_.assign(plan.phases.size() + 1, 0);
  for (std::size_t p = plan.phases.size(); p-- > 0;)
    driven_behind_[p] = driven_behind_[p + 1] + (plan.phases[p].driven ? 1 : 0);
}

std::uint32_t Timeline::enter(Rank r, std::int32_t step, std::int16_t phase) {
  PhaseSpan visit;
  visit.rank = r;
  visit.step = step;
  visit.phase = phase;
  visit.waiting_ns = 0;
  RankLine& mine = line(r);
  mine.drawn.assign(mine.drawn.size(), false);
  if (step != mine.step) mine.step = step, mine.left = mine.of_step;
  else mine.left -= std::min(mine.num_spans, 2 * mine.share);
  mine.num_spans = 0;
  // A stay takes up to twice its share, and leaves as much to each that is still to come.
  mine.share = mine.left / (2 * std::max(1, driven_behind_[static_cast<std::size_t>(phase)]));
  mine.visits.items.push_back(visit);
  return mine.visits.end() - 1;
}

void Timeline::entered(Rank r, std::uint32_t visit, std::int64_t now_ns) {
  auto& visits = line(r).visits;
  if (visit <= visits.first) return;
  std::int64_t& end_ns = visits.at(visit - 1).end_ns;
  end_ns = std::max(end_ns, now_ns);
}

std::uint32_t Timeline::begin_run(Rank r, const Args& args, std::int32_t block, std::int64_t num_items) {
  constexpr std::int64_t spans_of_run = 2;  // about: one for each stream that it uses
  RankLine& mine = line(r);
  HB_CHECK(!mine.visits.items.empty(), "rank {} runs an op before it entered a phase", r);
  PhaseSpan& visit = mine.visits.items.back();
  visit.blocks += args.times;
  BlockRun run{args.sizes, args.times, args.pairs_per_time, visit.step, block, mine.visits.end() - 1};
  if (recorded(mine, visit.step)) {
    const bool full = std::ssize(spans_) >= options_.max_spans;
    const bool one_by_one = !full && args.times == 1 && mine.num_spans + num_items <= mine.share;
    run.detail = one_by_one ? Detail::items : !full && mine.num_spans < 2 * mine.share ? Detail::run : Detail::stay;
    mine.num_spans += one_by_one ? num_items : spans_of_run;
  }
  mine.runs.items.push_back(run);
  return mine.runs.end() - 1;
}

void Timeline::leave(Rank r, std::int64_t blocks) {
  auto& visits = line(r).visits.items;
  if (!visits.empty()) visits.back().blocks = std::max(visits.back().blocks, blocks);
}

void Timeline::close_visits(RankLine& mine, std::uint32_t until) {
  while (mine.visits.first < until) {
    PhaseSpan visit = mine.visits.items.front();
    visit.start_ns = mine.before_ns;
    mine.before_ns = visit.end_ns = std::max(visit.end_ns, mine.before_ns);
    mine.stays.add(visit);
    mine.visits.pop();
  }
  while (!mine.runs.items.empty() && mine.runs.items.front().visit < until) mine.runs.pop();
}

std::int32_t Timeline::intern(const std::string& name) {
  const auto [at, is_new] = index_of_name_.try_emplace(name, static_cast<std::int32_t>(names_.size()));
  if (is_new) names_.push_back(name);
  return at->second;
}

std::int32_t Timeline::intern(std::string_view prefix, std::string_view name) {
  const auto [at, added] = index_of_parts_.try_emplace({prefix.data(), name.data()}, 0);
  return added ? at->second = intern(std::string(prefix).append(name)) : at->second;
}

Timeline::OpenEvents Timeline::open_memory(Rank r, const BoundBuffer& buffer, std::int64_t delta_bytes) {
  RankLine& mine = line(r);
  HB_CHECK(!mine.visits.items.empty(), "rank {} allocates before it entered a phase", r);
  const PhaseSpan& visit = mine.visits.items.back();
  if (!recorded(mine, visit.step)) return {};
  mine.memory_events.push_back({r, buffer.space(), buffer.category(), visit.phase, visit.step,
                                intern(buffer.prefix, buffer.buffer->name), 0, delta_bytes});
  return {std::ssize(mine.memory_events) - 1, 1};
}

Timeline::OpenEvents Timeline::open_memory(Rank r, std::string_view name, const CategoryBytes& device,
                                           const CategoryBytes& host) {
  RankLine& mine = line(r);
  const PhaseSpan& visit = mine.visits.items.back();
  const std::int64_t first = std::ssize(mine.memory_events);
  for (const Space space : {Space::device, Space::host}) {
    const CategoryBytes& bytes = space == Space::device ? device : host;
    for (int sign : {-1, 1})  // what goes makes room for what comes
      for (std::size_t c = 0; c < bytes.size(); ++c)
        if (sign * bytes[c] > 0)
          mine.memory_events.push_back(
              {r, space, static_cast<Category>(c), visit.phase, visit.step, intern(std::string(name)), 0, bytes[c]});
  }
  return {first, std::ssize(mine.memory_events) - first};
}

bool Timeline::draws_memory(Rank r, std::int32_t block) {
  RankLine& mine = line(r);
  const auto b = static_cast<std::size_t>(block);
  if (mine.drawn.size() <= b) mine.drawn.resize(b + 1);
  if (mine.drawn[b]) return false;
  return mine.drawn[b] = true;
}

Timeline::Figures Timeline::figures_of(RankLine& mine, const ProgramIndex& index, const OpInfo& item,
                                       const Sizes& sizes) const {
  const auto compute = [&] {
    Figures sum{sizes};
    index.each_op(item, [&](const BoundOp& op) {
      sum.bytes += op_bytes(*op, sizes, mine.places);
      sum.flops += op_flops(*op, sizes);
    });
    return sum;
  };
  if (item.segment < 0) return compute();
  const auto segment = static_cast<std::size_t>(item.segment);
  if (mine.figures.size() <= segment) mine.figures.resize(index.segments().size());
  Figures& known = mine.figures[segment];
  if (known.sizes != sizes) known = compute();
  return known;
}

/// The op's; of a segment its call's and what its body is.
std::int32_t Timeline::name_of_item(const OpInfo& item) {
  const BoundOp& op = item.op;
  if (is_memory(op->kind)) return intern(span_name(op));
  if (item.segment < 0 || is_communication(op->kind)) return intern(op.call->name, op->name);
  const auto [at, is_new] = index_of_parts_.try_emplace({op.call->name.data(), op.body().name.data()}, 0);
  return is_new ? at->second = intern(op.name_with_neighbours()) : at->second;
}

std::int32_t Timeline::name_of_run(const BlockRun& run, const OpInfo& item, const PhaseSpan& visit) {
  const std::string& block = item.op.block->name;
  if (run.detail == Detail::stay)
    return intern(fmt::format("{}: further blocks", plan_.phases[static_cast<std::size_t>(visit.phase)].name));
  return intern(run.times > 1 ? fmt::format("{} x {}", block, run.times) : block);
}

/// Into the span of its run or its stay on this stream.
void Timeline::add_together(RankLine& mine, const Span& s, const BlockRun& run, std::uint32_t run_index,
                            const OpInfo& item, const PhaseSpan& visit) {
  Growing& growing = mine.growing[static_cast<std::size_t>(s.stream)];
  const std::uint32_t of = run.detail == Detail::run ? run_index : run.visit;
  if (growing.detail != run.detail || growing.of != of) {
    growing = {run.detail, of, spans_.size()};
    spans_.push_back(s);
    spans_.back().name = name_of_run(run, item, visit);
  }
  std::int64_t& end_ns = spans_[growing.span].end_ns;
  end_ns = std::max(end_ns, s.end_ns);
}

void Timeline::finished(Rank r, StreamId stream, const ProgramIndex& index, const OpInfo& item, std::uint32_t run_index,
                        std::int64_t start_ns, std::int64_t end_ns) {
  RankLine& mine = line(r);
  const BoundOp& op = item.op;
  HB_CHECK(run_index >= mine.runs.first, "rank {}: {} '{}' ends after its phase", r, name_of(op->kind), op.name());
  const BlockRun run = mine.runs.at(run_index);
  close_visits(mine, run.visit);
  PhaseSpan& visit = mine.visits.at(run.visit);
  visit.end_ns = std::max(visit.end_ns, end_ns);
  if (end_ns == start_ns || run.detail == Detail::nothing) return;
  Span span{r, stream, op->kind, visit.phase, run.step, 0, start_ns, end_ns, 0, 0.0};
  if (run.detail != Detail::items) return add_together(mine, span, run, run_index, item, visit);
  const Figures figures = figures_of(mine, index, item, run.sizes);
  span.bytes = figures.bytes, span.flops = figures.flops;
  span.name = name_of_item(item);
  spans_.push_back(span);
}

void Timeline::waited(Rank r, std::uint32_t run_index, std::int64_t duration_ns) {
  RankLine& mine = line(r);
  mine.visits.at(mine.runs.at(run_index).visit).waiting_ns += duration_ns;
}

void Timeline::write(Trace& trace) {
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
    return std::tie(a.rank, a.start_ns, a.stream, a.end_ns) < std::tie(b.rank, b.start_ns, b.stream, b.end_ns);
  });
  for (const Stream& s : plan_.streams) trace.streams.push_back(s.name);
  trace.names = names_;
  trace.spans = std::move(spans_);
  for (RankLine& mine : lines_) {
    close_visits(mine, mine.visits.end());
    mine.stays.write(trace);
    trace.memory_events.insert(trace.memory_events.end(), mine.memory_events.begin(), mine.memory_events.end());
  }
  drop_partial_steps(trace);
}

}  // namespace hotbunk
