#include "reports/report_data.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "lowering/rollout.h"
#include "reports/palette.h"
#include "trace/compare.h"
#include "trace/critical_path.h"
#include "trace/memory_in_time.h"
#include "trace/static_memory.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr int timeline_points = 1200;       // per window of time: about one per pixel
constexpr Rank most_drawn = 16;             // ranks with pictures of their own
constexpr std::size_t most_matrix = 64;     // ranks of the traffic matrix
constexpr std::size_t most_spans = 40'000;  // embedded; about 2 MB
constexpr std::size_t most_buffers = 14;    // listed at the peak
constexpr std::int64_t most_bins = 48;      // of the histogram of lengths

constexpr double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

std::int64_t end_of_events(const Trace& trace) {
  std::int64_t end = 0;
  for (const MemoryEvent& e : trace.memory_events) end = std::max(end, e.time_ns);
  return end;
}

/// A trace may keep the operations and memory events of its first steps only; the pictures end with them.
Json recorded(const Trace& trace) {
  std::int64_t end_ns = 0;
  std::int32_t last_step = 0;
  const auto cover = [&](std::int32_t step, std::int64_t time_ns) {
    end_ns = std::max(end_ns, time_ns), last_step = std::max(last_step, step);
  };
  for (const MemoryEvent& e : trace.memory_events) cover(e.step, e.time_ns);
  for (const Span& s : trace.spans) cover(s.step, s.end_ns);
  for (const PhaseSpan& p : trace.phases)
    if (p.step == last_step) cover(p.step, p.end_ns);
  return {{"last_step", last_step}, {"end_s", seconds(end_ns)}};
}

std::int64_t total(const CategoryBytes& bytes) {
  std::int64_t sum = 0;
  for (const std::int64_t b : bytes) sum += b;
  return sum;
}

/// Time in pieces of one pixel or so: wide over the whole run, narrow within the steps that are looked at closely.
class Buckets {
 public:
  Buckets(const Trace& trace, std::int32_t peak_step) : wide_ns_(width(0, end_of_events(trace))) {
    for (const std::int32_t step : {std::int32_t{1}, peak_step}) {
      Window w{INT64_MAX, 0, 1};
      for (const PhaseSpan& p : trace.phases)
        if (p.step == step) w.start_ns = std::min(w.start_ns, p.start_ns), w.end_ns = std::max(w.end_ns, p.end_ns);
      if (w.start_ns < w.end_ns) w.bucket_ns = width(w.start_ns, w.end_ns), windows_.push_back(w);
    }
  }
  /// The start and width of the piece that holds this time.
  std::pair<std::int64_t, std::int64_t> of(std::int64_t time_ns) const {
    for (const Window& w : windows_)
      if (time_ns >= w.start_ns && time_ns <= w.end_ns) return {time_ns / w.bucket_ns * w.bucket_ns, w.bucket_ns};
    return {time_ns / wide_ns_ * wide_ns_, wide_ns_};
  }

 private:
  struct Window {
    std::int64_t start_ns, end_ns, bucket_ns;
  };
  static std::int64_t width(std::int64_t start_ns, std::int64_t end_ns) {
    return std::max<std::int64_t>(1, (end_ns - start_ns) / timeline_points);
  }
  std::int64_t wide_ns_;
  std::vector<Window> windows_;
};

/// Live bytes of one rank over time, at most two points per piece of time: the highest and the last, so that no peak
/// is lost however much is left out.
class Timeline {
 public:
  explicit Timeline(const Buckets& buckets) : buckets_(&buckets) {}

  void add(const MemoryEvent& e) {
    if (const auto bucket = buckets_->of(e.time_ns); bucket != bucket_) flush(), bucket_ = bucket;
    live_[static_cast<std::size_t>(e.category)] += e.delta_bytes;
    last_ns_ = e.time_ns;
    if (!pending_ || total(live_) > total(highest_)) highest_ = live_, highest_ns_ = e.time_ns;
    pending_ = true;
  }

  /// {"t": [seconds], "bytes": [[per category] per point]}; a value holds until the next point.
  Json finish() {
    flush();
    return {{"t", std::move(t_)}, {"bytes", std::move(bytes_)}};
  }

 private:
  void point(std::int64_t time_ns, const CategoryBytes& bytes) {
    t_.push_back(seconds(time_ns));
    bytes_.push_back(bytes);
  }
  void flush() {
    if (!pending_) return;
    point(highest_ns_, highest_);
    if (highest_ != live_) point(last_ns_, live_);
    pending_ = false;
  }

  const Buckets* buckets_;
  std::pair<std::int64_t, std::int64_t> bucket_{-1, -1};
  std::int64_t last_ns_ = 0, highest_ns_ = 0;
  bool pending_ = false;
  CategoryBytes live_{}, highest_{};
  Json t_ = Json::array(), bytes_ = Json::array();
};

/// The ranks whose memory and operations are drawn: of those that are not alike all in a small job, else the first ones
/// and the fullest.
std::vector<Rank> drawn_ranks(const Plan& plan, const Trace& trace, Rank peak_rank) {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < plan.num_ranks() && std::ssize(ranks) < most_drawn; ++r)
    if (trace.plays(r)) ranks.push_back(r);
  if (!ranks.empty() && std::ranges::find(ranks, trace.player_of(peak_rank)) == ranks.end())
    ranks.back() = trace.player_of(peak_rank);
  return ranks;
}

/// Who else does the same as a rank that is drawn: "ranks 0-3, 8", as far as there is room.
std::string alike(const Trace& trace, Rank rank) {
  constexpr std::size_t most_ranges = 4;
  std::vector<std::pair<Rank, Rank>> ranges;
  for (Rank r = rank; r < static_cast<Rank>(std::max<std::size_t>(trace.players.size(), 1)); ++r) {
    if (trace.player_of(r) != rank) continue;
    if (!ranges.empty() && ranges.back().second + 1 == r) ranges.back().second = r;
    else ranges.emplace_back(r, r);
  }
  if (ranges.empty() || (ranges.size() == 1 && ranges[0].first == ranges[0].second))
    return fmt::format("rank {}", rank);
  std::string out = "ranks ";
  for (std::size_t i = 0; i < std::min(ranges.size(), most_ranges); ++i) {
    if (i > 0) out += ", ";
    out += ranges[i].first == ranges[i].second ? fmt::format("{}", ranges[i].first)
                                               : fmt::format("{}–{}", ranges[i].first, ranges[i].second);
  }
  return out + (ranges.size() > most_ranges ? ", …" : "");
}

/// By rank; null for those that are not drawn.
/// `events`: the trace's, in time.
Json timelines(const Plan& plan, const Trace& trace, const std::vector<MemoryEvent>& events, Space space,
               const std::vector<Rank>& drawn, Rank peak_rank) {
  const auto peak = static_cast<std::size_t>(peak_rank);
  const Buckets buckets(trace, peak < trace.memory.size() ? trace.memory[peak].device.peak_step : 1);
  std::map<Rank, Timeline> by_rank;
  for (const Rank r : drawn) by_rank.emplace(r, Timeline(buckets));
  for (const MemoryEvent& e : events)
    if (const auto it = by_rank.find(e.rank); it != by_rank.end() && e.space == space) it->second.add(e);
  Json out = Json::array();
  for (Rank r = 0; r < plan.num_ranks() && r <= drawn.back(); ++r) {
    const auto it = by_rank.find(r);
    out.push_back(it == by_rank.end() ? Json(nullptr) : it->second.finish());
  }
  return out;
}

/// Tensors that are alive when a rank's live bytes first are highest, in a phase or (-1) at all, largest first.
Json tensors_at_peak(const Plan& plan, Rank rank, std::int16_t phase) {
  Json rows = Json::array();
  std::int64_t others = 0, other_bytes = 0;
  for (const LiveTensors& t : live_tensors_at_peak(plan, rank, phase))
    if (rows.size() < most_buffers)
      rows.push_back({{"name", t.name}, {"category", name_of(t.category)}, {"buffers", t.buffers}, {"bytes", t.bytes}});
    else others += t.buffers, other_bytes += t.bytes;
  return {{"rows", rows}, {"others", others}, {"other_bytes", other_bytes}};
}

/// Spans of the prologue and of as many first steps as there is room for; rows are
/// [rank, stream, kind, phase, step, name, start_s, end_s, bytes, on the critical path].
Json spans_json(const Trace& trace, const std::vector<Rank>& drawn, const CriticalPath& path) {
  const std::set<std::size_t> critical(path.spans.begin(), path.spans.end());
  const auto is_drawn = [&](const Span& s) { return std::find(drawn.begin(), drawn.end(), s.rank) != drawn.end(); };
  std::map<std::int32_t, std::size_t> per_step;
  for (const Span& s : trace.spans)
    if (is_drawn(s)) ++per_step[s.step];
  std::int32_t last_step = 0;
  std::size_t sum = 0;
  for (const auto& [step, count] : per_step) {
    if (step > 1 && sum + count > most_spans) break;
    sum += count;
    last_step = step;
  }
  Json rows = Json::array(), names = Json::array(), kinds = Json::array();
  std::map<std::int32_t, std::size_t> number;
  for (std::size_t i = 0; i < trace.spans.size(); ++i) {
    const Span& s = trace.spans[i];
    if (s.step > last_step || rows.size() >= most_spans || !is_drawn(s)) continue;
    const auto [it, is_new] = number.try_emplace(s.name, names.size());
    if (is_new) names.push_back(trace.names[static_cast<std::size_t>(s.name)]);
    rows.push_back({s.rank, static_cast<int>(s.stream), static_cast<int>(s.kind), s.phase, s.step, it->second,
                    seconds(s.start_ns), seconds(s.end_ns), s.bytes, critical.count(i)});
  }
  for (int k = 0; k < num_op_kinds; ++k) kinds.push_back(name_of(static_cast<OpKind>(k)));
  return {{"rows", rows}, {"names", names}, {"kinds", kinds}, {"last_step", last_step}, {"of", trace.spans.size()}};
}

/// Bytes that rank r sent to rank c in all steps. Ring collectives send to the next member of the group; what has no
/// fixed peer is spread evenly over the others.
Json matrix_json(const Plan& plan, const Trace& trace) {
  const std::size_t n = std::min(static_cast<std::size_t>(plan.num_ranks()), most_matrix);
  std::vector<std::vector<double>> sent(n, std::vector<double>(n, 0.0));
  for (std::size_t r = 0; r < std::min(n, trace.traffic_totals.size()); ++r)
    for (const auto& [key, count] : trace.traffic_totals[r]) {
      const auto& members = plan.group_of(key.group, static_cast<Rank>(r));
      const auto me = std::find(members.begin(), members.end(), static_cast<Rank>(r));
      if (me == members.end() || members.size() < 2) continue;
      const bool ring =
          key.op == OpKind::all_gather || key.op == OpKind::reduce_scatter || key.op == OpKind::all_reduce;
      const auto next = std::next(me) == members.end() ? members.begin() : std::next(me);
      const double each =
          static_cast<double>(count.wire_bytes) / (ring ? 1.0 : static_cast<double>(members.size() - 1));
      for (const Rank to : members)
        if (static_cast<std::size_t>(to) < n && (ring ? to == *next : to != static_cast<Rank>(r)))
          sent[r][static_cast<std::size_t>(to)] += each;
    }
  return sent;
}

/// How long each engine was busy in a rollout and waited for the last one at its end: means over its ranks and the
/// steps that have rows.
Json rollout_json(const ReportInput& in) {
  const std::int32_t rollout = in.plan.phase_index("rollout");
  struct Sum {
    double busy_s = 0.0, idle_s = 0.0, longest_idle_s = 0.0;
    std::int64_t stays = 0;
    std::set<Rank> ranks;
  };
  std::map<std::int32_t, std::int64_t> end_of_step;
  for (const PhaseSpan& p : in.trace.phases)
    if (p.phase == rollout) end_of_step[p.step] = std::max(end_of_step[p.step], p.end_ns);
  std::map<std::int64_t, Sum> engines;
  for (const PhaseSpan& p : in.trace.phases) {
    if (p.phase != rollout) continue;
    Sum& sum = engines[engine_seat(in.scenario.rollout.layout, p.rank).engine];
    const double idle_s = seconds(end_of_step[p.step] - p.end_ns);
    sum.busy_s += seconds(p.end_ns - p.start_ns), sum.idle_s += idle_s, ++sum.stays;
    sum.longest_idle_s = std::max(sum.longest_idle_s, idle_s);
    sum.ranks.insert(p.rank);
  }
  Json rows = Json::array();
  for (const auto& [engine, sum] : engines) {
    const auto stays = static_cast<double>(sum.stays);
    rows.push_back({{"engine", engine},
                    {"ranks", sum.ranks},
                    {"busy_s", sum.busy_s / stays},
                    {"idle_s", sum.idle_s / stays},
                    {"longest_idle_s", sum.longest_idle_s}});
  }
  return rows;
}

/// Responses by length, all iterations together: {"width", "counts", "mean", "max", "samples", "quantiles"}; null
/// without.
Json lengths_json(const LengthCounts& responses) {
  if (responses.empty()) return nullptr;
  const std::int64_t longest = responses.rbegin()->first;
  const std::int64_t width = std::max<std::int64_t>(1, (longest + most_bins - 1) / most_bins);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(longest / width) + 1, 0);
  std::int64_t samples = 0;
  double sum = 0.0;
  for (const auto& [length, count] : responses) {
    counts[static_cast<std::size_t>(length / width)] += count;
    samples += count;
    sum += static_cast<double>(length) * static_cast<double>(count);
  }
  Json quantiles = Json::array();
  for (const double q : {0.5, 0.9, 0.99}) {
    std::int64_t left = static_cast<std::int64_t>(std::ceil(q * static_cast<double>(samples)));
    auto at = responses.begin();
    while ((left -= at->second) > 0) ++at;
    quantiles.push_back({q, at->first});
  }
  return {{"width", width}, {"counts", counts},   {"mean", sum / static_cast<double>(samples)},
          {"max", longest}, {"samples", samples}, {"quantiles", quantiles}};
}

Json named(const auto& colours, auto name) {
  Json out = Json::array();
  for (std::size_t i = 0; i < colours.size(); ++i) out.push_back({{"name", name(i)}, {"colour", colours[i]}});
  return out;
}

Json provenance(const ReportInput& in, const Json& summary) {
  const Scenario& s = in.scenario;
  const auto text = [](auto... parts) { return fmt::format("{}{}{}", parts...); };
  Json rows = Json::array();
  const auto row = [&](const char* key, const std::string& value) { rows.push_back({key, value}); };
  row("scenario", s.name);
  row("model", s.model.name);
  row("device", s.cluster.gpu.name);
  row("ranks",
      fmt::format("{} ({} node{} x {} device{} x {} rank{})", in.plan.num_ranks(), s.cluster.nodes,
                  s.cluster.nodes == 1 ? "" : "s", s.cluster.gpus_per_node, s.cluster.gpus_per_node == 1 ? "" : "s",
                  s.cluster.ranks_per_device, s.cluster.ranks_per_device == 1 ? "" : "s"));
  row("plan hash", plan_hash(in.plan));
  row("times are", in.trace.source);
  if (in.trace.source == "simulated" || in.predicted != nullptr)
    row("calibration", in.calibration.empty() ? "none: datasheet rates" : in.calibration);
  row("framework profile", s.profile);
  if (const Json& kept = summary["kept"]; kept["steps"].get<std::int64_t>() < kept["of"].get<std::int64_t>())
    row("rows", fmt::format("of {} of {} steps: the first, one in {}, the slowest, the last; totals, means and the "
                            "comparison's sums are over all steps",
                            kept["steps"].get<std::int64_t>(), kept["of"].get<std::int64_t>(),
                            kept["every"].get<std::int64_t>()));
  row("seed", fmt::format("{}", s.seed));
  row("hotbunk", text("version ", HOTBUNK_VERSION, ""));
  for (const auto& [key, value] : in.origin) rows.push_back({key, value});
  return rows;
}

}  // namespace

Json report_data(const ReportInput& in) {
  Json phases = Json::array(), when = Json::array(), visits = Json::array();
  for (const PhaseInfo& p : in.plan.phases) {
    phases.push_back(p.name);
    when.push_back(p.when == When::prologue ? "prologue" : p.when == When::iteration ? "iteration" : "epilogue");
  }
  Json summary = summarize(in.plan, in.scenario, in.trace);
  const auto peak_rank = summary["memory"]["peak_rank"].get<Rank>();
  const std::vector<Rank> drawn = drawn_ranks(in.plan, in.trace, peak_rank);
  summary.erase("traffic");  // step by step; the page shows the totals, summary.json has both
  Json out = {{"summary", std::move(summary)}, {"predicted", nullptr}, {"comparison", nullptr}};
  if (in.predicted != nullptr) {
    out["predicted"] = summarize(in.plan, in.scenario, *in.predicted);
    out["comparison"] = comparison_to_json(compare_traces(in.plan, *in.predicted, in.trace));
  }
  out["overhead_bytes"] = in.plan.overhead_bytes;
  out["phases"] = std::move(phases);
  out["when"] = std::move(when);
  out["categories"] = named(category_colours, [](std::size_t i) { return name_of(static_cast<Category>(i)); });
  out["streams"] = Json::array();
  for (std::size_t i = 0; i < in.plan.streams.size(); ++i)
    out["streams"].push_back(
        {{"name", in.plan.streams[i].name}, {"colour", stream_colours[i % stream_colours.size()]}});
  out["recorded"] = recorded(in.trace);
  // Pictures of time end where operations and memory events do.
  const std::int32_t last_drawn = std::max(1, out["recorded"]["last_step"].get<std::int32_t>());
  for (const PhaseSpan& p : in.trace.phases)
    if (p.step <= last_drawn && std::find(drawn.begin(), drawn.end(), p.rank) != drawn.end())
      visits.push_back({p.rank, p.step, p.phase, seconds(p.start_ns), seconds(p.end_ns)});
  out["drawn"] = drawn;
  out["who"] = Json::object();
  for (const Rank rank : drawn) out["who"][std::to_string(rank)] = alike(in.trace, rank);
  out["num_ranks"] = in.plan.num_ranks();
  out["folded"] = !in.trace.players.empty();
  const std::vector<MemoryEvent> events = memory_in_time(in.trace);
  out["timeline"] = timelines(in.plan, in.trace, events, Space::device, drawn, peak_rank);
  out["host_timeline"] = timelines(in.plan, in.trace, events, Space::host, drawn, peak_rank);
  out["at_peak"] = tensors_at_peak(in.plan, peak_rank, -1);
  const CriticalPath path = critical_path(in.plan, in.trace, last_recorded_step(in.plan, in.trace));
  out["spans"] = spans_json(in.trace, drawn, path);
  out["critical"] = critical_path_json(in.plan, in.trace, path);
  out["visits"] = std::move(visits);
  out["matrix"] = matrix_json(in.plan, in.trace);
  out["rollout"] = rollout_json(in);
  out["lengths"] = lengths_json(in.responses);
  out["samples"] = in.samples;
  out["provenance"] = provenance(in, out["summary"]);
  return out;
}

}  // namespace hotbunk
