#include <fmt/format.h>

#include <limits>

#include "graph/json_decode.h"
#include "spec/json_read.h"
#include "trace/folds.h"
#include "trace/trace_json.h"

namespace hotbunk {
namespace {

using decode::Value;

constexpr decode::Codes codes{"E112", "E113"};
constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t most_ranks = std::int64_t{1} << 20;
constexpr std::int64_t most_phases = std::numeric_limits<std::int16_t>::max();
constexpr JsonLimits limits{.max_depth = 12, .max_values = 1'000'000'000};

/// The enumerators that the file's own table of names stands for.
template <class Enum>
std::vector<Enum> read_names(const Value& v, int count) {
  std::vector<Enum> table;
  for (std::size_t i = 0; i < v.array(); ++i) table.push_back(v.at(i).name<Enum>(count));
  return table;
}

template <class Enum>
Enum pick(const Value& v, const std::vector<Enum>& table) {
  return table[static_cast<std::size_t>(v.integer(0, static_cast<std::int64_t>(table.size()) - 1))];
}

struct Tables {
  std::vector<OpKind> kinds;
  std::vector<Category> categories;
  std::int64_t num_streams = 0, num_names = 0, num_ranks = 0;
};

std::int16_t read_phase(const Value& v, std::int64_t least = 0) {
  return static_cast<std::int16_t>(v.integer(least, most_phases));
}

std::int32_t read_step(const Value& v) { return v.int32(0, std::numeric_limits<std::int32_t>::max()); }

/// All names are written even when the trace has rows of none, so a name index is always checked against them.
std::int32_t read_name(const Value& v, const Tables& t) { return v.int32(0, t.num_names - 1); }

Span read_span(const Value& v, const Tables& t) {
  v.array(10, 10);
  Span s;
  s.rank = v.at(0).int32(0, t.num_ranks - 1);
  s.stream = static_cast<StreamId>(v.at(1).integer(0, t.num_streams - 1));
  s.kind = pick(v.at(2), t.kinds);
  s.phase = read_phase(v.at(3));
  s.step = read_step(v.at(4));
  s.name = read_name(v.at(5), t);
  s.start_ns = v.at(6).integer(0, largest);
  s.end_ns = v.at(7).integer(s.start_ns, largest);
  s.bytes = v.at(8).integer(0, largest);
  s.flops = v.at(9).real();
  return s;
}

MemoryEvent read_event(const Value& v, const Tables& t) {
  v.array(8, 8);
  MemoryEvent e;
  e.rank = v.at(0).int32(0, t.num_ranks - 1);
  e.space = v.at(1).integer(0, 1) == 0 ? Space::device : Space::host;
  e.category = pick(v.at(2), t.categories);
  e.phase = read_phase(v.at(3));
  e.step = read_step(v.at(4));
  e.name = read_name(v.at(5), t);
  e.time_ns = v.at(6).integer(0, largest);
  e.delta_bytes = v.at(7).integer(-largest, largest);
  return e;
}

PhaseSpan read_phase_span(const Value& v, const Tables& t) {
  v.array(7, 7);
  PhaseSpan p;
  p.rank = v.at(0).int32(0, t.num_ranks - 1);
  p.step = read_step(v.at(1));
  p.phase = read_phase(v.at(2));
  p.start_ns = v.at(3).integer(0, largest);
  p.end_ns = v.at(4).integer(p.start_ns, largest);
  p.blocks = v.at(5).integer(0, largest);
  p.waiting_ns = v.at(6).integer(-1, largest);
  return p;
}

PhaseTotal read_total(const Value& v, const Tables& t) {
  v.array(10, 10);
  PhaseTotal total;
  total.rank = v.at(0).int32(0, t.num_ranks - 1);
  total.phase = read_phase(v.at(1), PhaseTotal::iteration);
  total.blocks = v.at(2).integer(0, largest);
  total.waiting_ns = v.at(3).integer(-1, largest);
  Durations& d = total.stays;
  d.times = v.at(4).integer(0, largest);
  d.total_ns = v.at(5).integer(0, largest);
  d.shortest_ns = v.at(6).integer(0, largest);
  d.longest_ns = v.at(7).integer(d.shortest_ns, largest);
  d.longest_step = read_step(v.at(8));
  const Value counts = v.at(9);
  for (std::size_t i = 0; i < counts.array(); ++i) {
    const Value pair = counts.at(i);
    pair.array(2, 2);
    d.counts[pair.at(0).int32(0, 64 * 32)] = pair.at(1).integer(0, largest);
  }
  return total;
}

CategoryBytes read_categories(const Value& v, const Tables& t) {
  v.array(t.categories.size(), t.categories.size());
  CategoryBytes bytes{};
  for (std::size_t i = 0; i < t.categories.size(); ++i)
    bytes[static_cast<std::size_t>(t.categories[i])] = v.at(i).integer(-largest, largest);
  return bytes;
}

SpaceMemory read_space(const Value& v, const Tables& t) {
  v.array(9, 9);
  SpaceMemory m;
  m.peak_bytes = v.at(0).integer(0, largest);
  m.mapped_peak_bytes = v.at(1).integer(0, largest);
  m.peak_step = read_step(v.at(2));
  m.peak_phase = read_phase(v.at(3), -1);
  m.at_peak = read_categories(v.at(4), t);
  m.category_peaks = read_categories(v.at(5), t);
  m.end_live_bytes = v.at(6).integer(-largest, largest);
  m.end_mapped_bytes = v.at(7).integer(-largest, largest);
  const Value peaks = v.at(8);
  for (std::size_t i = 0; i < peaks.array(); ++i) {
    const Value row = peaks.at(i);
    row.array(4, 4);
    m.phase_peaks[read_phase(row.at(0))] = {row.at(1).integer(0, largest), row.at(2).integer(0, largest),
                                            read_categories(row.at(3), t)};
  }
  return m;
}

RankTraffic read_traffic(const Value& v, const Tables& t) {
  RankTraffic rows;
  for (std::size_t i = 0; i < v.array(); ++i) {
    const Value row = v.at(i);
    row.array(8, 8);
    const TrafficKey key{read_step(row.at(0)), read_phase(row.at(1)), read_phase(row.at(2)), pick(row.at(3), t.kinds)};
    rows[key] = {row.at(4).integer(0, largest), row.at(5).integer(0, largest), row.at(6).integer(0, largest),
                 row.at(7).integer(0, largest)};
  }
  return rows;
}

StepMetrics read_metrics(const Value& v) {
  StepMetrics m;
  m.step = read_step(v["step"]);
  const Value values = v["values"];
  for (const std::string& key : values.keys()) m.values[key] = values[key].real();
  return m;
}

LinkTraffic read_link(const Value& v) {
  v.array(8, 8);
  return {.name = v.at(0).text(),
          .kind = v.at(1).text(),
          .links = v.at(2).integer(1, most_ranks * 6),
          .capacity_bytes_per_s = v.at(3).real(),
          .bytes = v.at(4).real(),
          .busy_ns = v.at(5).integer(0, largest),
          .full_ns = v.at(6).real(),
          .peak = v.at(7).real()};
}

template <class Row, class Read>
std::vector<Row> read_rows(const Value& v, Read read) {
  std::vector<Row> rows;
  rows.reserve(v.array());
  for (std::size_t i = 0; i < v.size(); ++i) rows.push_back(read(v.at(i)));
  return rows;
}

/// Each rank, or each by one that plays itself, and whose rows are there.
void check_players(const Value& v, const Trace& trace) {
  if (!trace.players.empty()) v["players"].array(trace.memory.size(), trace.memory.size());
  for (std::size_t r = 0; r < trace.players.size(); ++r)
    if (trace.player_of(trace.players[r]) != trace.players[r])
      v["players"].at(r).wrong_type("the number of a rank that is played itself");
  for (const char* key : {"memory", "traffic", "traffic_totals"})
    for (std::size_t r = 0; r < v[key].size(); ++r)
      if (v[key].at(r).is_null() && trace.plays(static_cast<Rank>(r))) v[key].at(r).wrong_type("what this rank did");
}

Trace read_trace(const Value& v) {
  Trace trace;
  trace.source = v["source"].text();
  trace.trained_tokens = v["trained_tokens"].integer(0, largest);
  trace.model_flops = v["model_flops"].real();
  trace.names = read_rows<std::string>(v["names"], [](const Value& row) { return row.text(); });
  v["streams"].array(0, max_streams);
  trace.streams = read_rows<std::string>(v["streams"], [](const Value& row) { return row.text(); });
  const Tables t{read_names<OpKind>(v["kinds"], num_op_kinds), read_names<Category>(v["categories"], num_categories),
                 std::ssize(trace.streams), std::ssize(trace.names),
                 static_cast<std::int64_t>(v["memory"].array(0, most_ranks))};
  trace.spans = read_rows<Span>(v["spans"], [&](const Value& row) { return read_span(row, t); });
  trace.memory_events =
      read_rows<MemoryEvent>(v["memory_events"], [&](const Value& row) { return read_event(row, t); });
  trace.phases = read_rows<PhaseSpan>(v["phases"], [&](const Value& row) { return read_phase_span(row, t); });
  trace.phase_totals = read_rows<PhaseTotal>(v["phase_totals"], [&](const Value& row) { return read_total(row, t); });
  trace.players = read_rows<Rank>(v["players"], [&](const Value& row) { return row.int32(0, t.num_ranks - 1); });
  const auto by_rank = [&]<class Row>(const char* key, std::vector<Row>& rows, auto read) {
    v[key].array(0, most_ranks);
    rows = read_rows<Row>(v[key], [&](const Value& row) { return row.is_null() ? Row{} : read(row); });
  };
  by_rank("memory", trace.memory, [&](const Value& row) {
    row.array(2, 2);
    return RankMemory{read_space(row.at(0), t), read_space(row.at(1), t)};
  });
  by_rank("traffic", trace.traffic, [&](const Value& row) { return read_traffic(row, t); });
  by_rank("traffic_totals", trace.traffic_totals, [&](const Value& row) { return read_traffic(row, t); });
  check_players(v, trace);
  stand_in(trace);
  trace.metrics = read_rows<StepMetrics>(v["metrics"], read_metrics);
  if (v.has("links")) trace.links = read_rows<LinkTraffic>(v["links"], read_link);
  return trace;
}

}  // namespace

Result<TraceFile> trace_from_json(std::string_view text, const std::string& file) {
  auto json = parse_json(text, file, limits, "E111");
  if (!json) {
    json.error().front().help = "the file is damaged or cut short: simulate or run again";
    return fail(json.error());
  }
  try {
    const Value document(*json, file, codes);
    const std::string schema = document["schema"].text();
    if (schema != "hotbunk.trace/3")
      return fail(
          Diagnostic{.code = "E114",
                     .message = fmt::format("schema is \"{}\", not \"hotbunk.trace/3\"", schema.substr(0, 60)),
                     .where = {file},
                     .notes = {},
                     .help = "give the trace.json of a run folder; one that another version wrote is made again"});
    return TraceFile{document["plan_hash"].text(), read_trace(document)};
  } catch (const decode::Fault& fault) {
    return fail(fault.diagnostic);
  }
}

Status trace_fits_plan(const Trace& trace, const Plan& plan, const std::string& file) {
  const auto ranks = static_cast<std::size_t>(plan.num_ranks());
  std::string why;
  const auto phase = [&](int index) {
    if (index >= static_cast<int>(plan.phases.size()))
      why = fmt::format("it has phase {}, the plan has {} phases", index, plan.phases.size());
  };
  if (trace.memory.size() != ranks || trace.traffic.size() != ranks || trace.traffic_totals.size() != ranks)
    why = fmt::format("it has {} ranks, the plan has {}", trace.memory.size(), ranks);
  if (!std::ranges::equal(trace.streams, plan.streams, {}, {}, &Stream::name)) why = "its streams are others";
  for (const PhaseTotal& t : trace.phase_totals) phase(t.phase);
  for (const Span& s : trace.spans) phase(s.phase);
  for (const MemoryEvent& e : trace.memory_events) phase(e.phase);
  for (const PhaseSpan& p : trace.phases) phase(p.phase);
  for (const RankMemory& m : trace.memory)
    for (const SpaceMemory* s : {&m.device, &m.host}) {
      phase(s->peak_phase);
      for (const auto& [index, peak] : s->phase_peaks) phase(index);
    }
  for (const auto* table : {&trace.traffic, &trace.traffic_totals})
    for (const RankTraffic& rows : *table)
      for (const auto& [key, count] : rows) {
        phase(key.phase);
        if (key.group >= static_cast<int>(plan.groups.size()))
          why = fmt::format("it has group {}, the plan has {} groups", key.group, plan.groups.size());
      }
  if (why.empty()) return {};
  return fail(Diagnostic{.code = "E115",
                         .message = "the trace is not of this plan: " + why,
                         .where = {file},
                         .notes = {},
                         .help = "give the plan.json and trace.json of one run folder"});
}

}  // namespace hotbunk
