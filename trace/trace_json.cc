#include "trace/trace_json.h"

#include "graph/json_text.h"

namespace hotbunk {
namespace {

/// [a,b,c] of integers (enumerators by their number) and doubles.
template <class... T>
void append_row(std::string& out, T... values) {
  out += '[';
  Commas commas;
  const auto one = [&](auto value) {
    commas.before(out);
    if constexpr (std::is_floating_point_v<decltype(value)>) append_json(out, value);
    else append_json(out, static_cast<std::int64_t>(value));
  };
  (one(values), ...);
  out += ']';
}

template <class Range, class Append>
void append_rows(std::string& out, std::string_view key, const Range& range, Append append) {
  out += ",\n\"", out += key, out += "\":[";
  Commas commas;
  for (const auto& element : range) commas.before(out), append(element);
  out += ']';
}

template <class Enum>
void append_names(std::string& out, std::string_view key, int count) {
  out += ",\n\"", out += key, out += "\":[";
  Commas commas;
  for (int i = 0; i < count; ++i) commas.before(out), append_json(out, name_of(static_cast<Enum>(i)));
  out += ']';
}

void append_categories(std::string& out, const CategoryBytes& bytes) {
  out += '[';
  Commas commas;
  for (const std::int64_t b : bytes) commas.before(out), append_json(out, b);
  out += ']';
}

void append_memory(std::string& out, const SpaceMemory& m) {
  out += '[';
  append_json(out, m.peak_bytes), out += ',';
  append_json(out, m.mapped_peak_bytes), out += ',';
  append_json(out, m.peak_step), out += ',';
  append_json(out, std::int32_t{m.peak_phase}), out += ',';
  append_categories(out, m.at_peak), out += ',';
  append_categories(out, m.category_peaks), out += ',';
  append_json(out, m.end_live_bytes), out += ',';
  append_json(out, m.end_mapped_bytes), out += ",[";
  Commas commas;
  for (const auto& [phase, peak] : m.phase_peaks) {
    commas.before(out);
    out += '[', append_json(out, std::int32_t{phase}), out += ',';
    append_json(out, peak.peak_bytes), out += ',';
    append_json(out, peak.mapped_peak_bytes), out += ',';
    append_categories(out, peak.by_category), out += ']';
  }
  out += "]]";
}

void append_total(std::string& out, const PhaseTotal& t) {
  const Durations& d = t.stays;
  out += '[';
  Commas commas;
  for (const std::int64_t n : {std::int64_t{t.rank}, std::int64_t{t.phase}, t.blocks, t.waiting_ns, d.times, d.total_ns,
                               d.shortest_ns, d.longest_ns, std::int64_t{d.longest_step}})
    commas.before(out), append_json(out, n);
  out += ",[";
  Commas pairs;
  for (const auto& [which, count] : d.counts) pairs.before(out), append_row(out, which, count);
  out += "]]";
}

void append_traffic(std::string& out, const RankTraffic& rows) {
  out += '[';
  Commas commas;
  for (const auto& [key, count] : rows) {
    commas.before(out);
    append_row(out, key.step, key.phase, key.group, key.op, count.calls, count.payload_bytes, count.padding_bytes,
               count.wire_bytes);
  }
  out += ']';
}

/// What is there of others is what their players have.
template <class Row>
std::vector<const Row*> rows_of_players(const Trace& trace, const std::vector<Row>& rows) {
  std::vector<const Row*> out;
  for (const Row& row : rows)
    if (trace.plays(row.rank)) out.push_back(&row);
  return out;
}

void append_metrics(std::string& out, const StepMetrics& m) {
  out += "{\"step\":", append_json(out, m.step), out += ",\"values\":{";
  Commas commas;
  for (const auto& [name, value] : m.values)
    commas.before(out), append_json(out, name), out += ':', append_json(out, value);
  out += "}}";
}

}  // namespace

std::string trace_to_json(const Trace& trace, std::string_view plan_hash) {
  std::string out = "{\"schema\":\"hotbunk.trace/3\"";
  out += ",\"plan_hash\":", append_json(out, plan_hash);
  out += ",\"source\":", append_json(out, trace.source);
  out += ",\"trained_tokens\":", append_json(out, trace.trained_tokens);
  out += ",\"model_flops\":", append_json(out, trace.model_flops);
  append_rows(out, "streams", trace.streams, [&](const std::string& name) { append_json(out, name); });
  append_names<OpKind>(out, "kinds", num_op_kinds);
  append_names<Category>(out, "categories", num_categories);
  append_rows(out, "names", trace.names, [&](const std::string& name) { append_json(out, name); });
  append_rows(out, "spans", trace.spans, [&](const Span& s) {
    append_row(out, s.rank, s.stream, s.kind, s.phase, s.step, s.name, s.start_ns, s.end_ns, s.bytes, s.flops);
  });
  append_rows(out, "memory_events", trace.memory_events, [&](const MemoryEvent& e) {
    append_row(out, e.rank, e.space, e.category, e.phase, e.step, e.name, e.time_ns, e.delta_bytes);
  });
  append_rows(out, "players", trace.players, [&](Rank r) { append_json(out, r); });
  append_rows(out, "phases", rows_of_players(trace, trace.phases), [&](const PhaseSpan* p) {
    append_row(out, p->rank, p->step, p->phase, p->start_ns, p->end_ns, p->blocks, p->waiting_ns);
  });
  append_rows(out, "phase_totals", rows_of_players(trace, trace.phase_totals),
              [&](const PhaseTotal* t) { append_total(out, *t); });
  const auto by_rank = [&](const char* key, const auto& rows, auto append) {
    Rank rank = 0;
    append_rows(out, key, rows, [&](const auto& row) {
      if (trace.plays(rank++)) append(row);
      else out += "null";
    });
  };
  by_rank("memory", trace.memory, [&](const RankMemory& m) {
    out += '[', append_memory(out, m.device), out += ',', append_memory(out, m.host), out += ']';
  });
  by_rank("traffic", trace.traffic, [&](const RankTraffic& rows) { append_traffic(out, rows); });
  by_rank("traffic_totals", trace.traffic_totals, [&](const RankTraffic& rows) { append_traffic(out, rows); });
  append_rows(out, "metrics", trace.metrics, [&](const StepMetrics& m) { append_metrics(out, m); });
  append_rows(out, "links", trace.links, [&](const LinkTraffic& l) {
    out += '[', append_json(out, l.name), out += ',', append_json(out, l.kind), out += ',', append_json(out, l.links);
    for (const double value : {l.capacity_bytes_per_s, l.bytes}) out += ',', append_json(out, value);
    out += ',', append_json(out, l.busy_ns);
    for (const double value : {l.full_ns, l.peak}) out += ',', append_json(out, value);
    out += ']';
  });
  out += "}\n";
  return out;
}

}  // namespace hotbunk
