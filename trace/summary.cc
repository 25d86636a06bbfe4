#include "trace/summary.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "trace/critical_path.h"
#include "trace/gpu_timeline.h"
#include "trace/kept_steps.h"
#include "trace/static_memory.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr double ns = 1e-9;  // seconds
/// Ranks up to which each has a row of its own.
constexpr std::int64_t most_listed = 256;

/// The ranks' stays in one phase of one step.
struct Stay {
  std::int64_t start_ns = INT64_MAX, total_ns = 0, ranks = 0;
  void add(const PhaseSpan& p) {
    start_ns = std::min(start_ns, p.start_ns), total_ns += p.end_ns - p.start_ns, ++ranks;
  }
  double seconds() const { return static_cast<double>(total_ns) * ns / static_cast<double>(ranks); }
};

/// All ranks' stays in one phase, all steps together.
struct Total {
  Durations stays;
  std::int64_t ranks = 0, most_times = 0, waiting_ns = 0;
  bool waiting_known = true;
  void add(const PhaseTotal& t) {
    stays.add(t.stays), ++ranks, most_times = std::max(most_times, t.stays.times);
    waiting_ns += t.waiting_ns, waiting_known = waiting_known && t.waiting_ns >= 0;
  }
  /// Of its stays, on average; none: a run does not measure it.
  std::optional<double> waiting_seconds() const {
    if (!waiting_known || stays.times == 0) return {};
    return static_cast<double>(waiting_ns) * ns / static_cast<double>(stays.times);
  }
  /// Of a rank in the whole run.
  double seconds() const {
    return ranks == 0 ? 0.0 : static_cast<double>(stays.total_ns) * ns / static_cast<double>(ranks);
  }
};

std::map<std::int16_t, Total> totals_of(const Trace& trace) {
  std::map<std::int16_t, Total> out;
  for (const PhaseTotal& t : trace.phase_totals) out[t.phase].add(t);
  return out;
}

std::string phase_name(const Plan& plan, std::int16_t phase) {
  return phase < 0 ? "" : plan.phases[static_cast<std::size_t>(phase)].name;
}

Json phases_json(const Plan& plan, const Trace& trace) {
  std::map<std::pair<std::int32_t, std::int16_t>, Stay> stays;  // by step and phase
  for (const PhaseSpan& p : trace.phases) stays[{p.step, p.phase}].add(p);
  std::vector<std::tuple<std::int64_t, std::int32_t, std::int16_t, double>> order;
  for (const auto& [key, stay] : stays) order.emplace_back(stay.start_ns, key.first, key.second, stay.seconds());
  std::sort(order.begin(), order.end());
  Json rows = Json::array();
  for (const auto& [start_ns, step, phase, seconds] : order)
    rows.push_back({{"step", step},
                    {"name", phase_name(plan, phase)},
                    {"start", static_cast<double>(start_ns) * ns},
                    {"seconds", seconds}});
  return rows;
}

Json total_json(const Total& total) {
  const Durations& d = total.stays;
  return {{"times", total.most_times},
          {"seconds", total.seconds()},
          {"mean", d.times > 0 ? static_cast<double>(d.total_ns) * ns / static_cast<double>(d.times) : 0.0},
          {"shortest", static_cast<double>(d.shortest_ns) * ns},
          {"p50", d.quantile_ns(0.5) * ns},
          {"p95", d.quantile_ns(0.95) * ns},
          {"longest", static_cast<double>(d.longest_ns) * ns},
          {"longest_step", d.longest_step}};
}

/// In the plan's order, which is that of time.
Json totals_json(const Plan& plan, const std::map<std::int16_t, Total>& totals) {
  Json rows = Json::array();
  for (const auto& [phase, total] : totals) {
    if (phase == PhaseTotal::iteration) continue;
    Json row = {{"name", phase_name(plan, phase)}};
    row.update(total_json(total));
    row["waiting"] = total.waiting_seconds() ? Json(*total.waiting_seconds()) : Json(nullptr);
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Of which iterations there are rows.
Json kept_json(const Plan& plan, const Trace& trace, std::int64_t steps) {
  std::set<std::int32_t> kept;
  std::int32_t latest = 0;
  for (const PhaseSpan& p : trace.phases) {
    latest = std::max(latest, p.step);
    if (plan.phases[static_cast<std::size_t>(p.phase)].when == When::iteration) kept.insert(p.step);
  }
  return {{"steps", kept.size()},
          {"of", steps},
          {"every", KeptSteps::of(trace.num_players()).distance(latest)},
          {"metrics", trace.metrics.size()}};
}

Json categories_json(const CategoryBytes& bytes, std::int64_t overhead_bytes) {
  Json out = Json::object();
  for (int c = 0; c < num_categories; ++c) {
    const auto category = static_cast<Category>(c);
    out[std::string(name_of(category))] =
        bytes[static_cast<std::size_t>(c)] + (category == Category::overhead ? overhead_bytes : 0);
  }
  return out;
}

Json rank_json(const Plan& plan, std::size_t rank, const RankMemory& memory) {
  const SpaceMemory& device = memory.device;
  Json phases = Json::object();
  for (const auto& [phase, peak] : device.phase_peaks)
    phases[phase_name(plan, phase)] = {{"peak_bytes", peak.peak_bytes},
                                       {"mapped_peak_bytes", peak.mapped_peak_bytes},
                                       {"by_category", categories_json(peak.by_category, plan.overhead_bytes)}};
  return {{"rank", rank},
          {"peak_bytes", device.peak_bytes},
          {"mapped_peak_bytes", device.mapped_peak_bytes},
          {"at_peak", categories_json(device.at_peak, plan.overhead_bytes)},
          {"category_peaks", categories_json(device.category_peaks, plan.overhead_bytes)},
          {"phase_peaks", phases},
          {"host",
           {{"peak_bytes", memory.host.peak_bytes},
            {"mapped_peak_bytes", memory.host.mapped_peak_bytes},
            {"category_peaks", categories_json(memory.host.category_peaks, 0)}}}};
}

/// All of few. Of more those whose memory over time the trace has, and of the others the first with just such peaks.
class ListedRanks {
 public:
  explicit ListedRanks(const Trace& trace) : trace_(trace), all_(std::ssize(trace.memory) <= most_listed) {
    for (const MemoryEvent& e : trace.memory_events) drawn_.insert(e.rank);
  }
  bool operator()(std::size_t rank) {
    if (all_) return true;
    if (!trace_.plays(static_cast<Rank>(rank))) return false;
    const RankMemory& mine = trace_.memory[rank];
    const bool is_new = std::ranges::none_of(known_, [&](const RankMemory* m) { return *m == mine; });
    if (is_new) known_.push_back(&mine);
    return is_new || drawn_.contains(static_cast<Rank>(rank));
  }

 private:
  const Trace& trace_;
  const bool all_;
  std::set<Rank> drawn_;
  std::vector<const RankMemory*> known_;
};

Json memory_json(const Plan& plan, const Trace& trace) {
  ListedRanks listed(trace);
  std::size_t peak_rank = 0;
  std::int64_t mapped = 0;
  Json by_rank = Json::array();
  for (std::size_t r = 0; r < trace.memory.size(); ++r) {
    const SpaceMemory& device = trace.memory[r].device;
    if (device.peak_bytes > trace.memory[peak_rank].device.peak_bytes) peak_rank = r;
    mapped = std::max(mapped, device.mapped_peak_bytes);
    if (listed(r)) by_rank.push_back(rank_json(plan, r, trace.memory[r]));
  }
  const SpaceMemory highest = trace.memory.empty() ? SpaceMemory{} : trace.memory[peak_rank].device;
  return {{"capacity_bytes", plan.device_capacity_bytes},
          {"peak_bytes", highest.peak_bytes},
          {"mapped_peak_bytes", mapped},
          {"peak_rank", peak_rank},
          {"peak_phase", phase_name(plan, highest.peak_phase)},
          {"by_rank", by_rank}};
}

bool fits(const Plan& plan, const Trace& trace) {
  const auto within = [](std::int64_t bytes, std::int64_t capacity) { return capacity == 0 || bytes <= capacity; };
  return std::all_of(trace.memory.begin(), trace.memory.end(), [&](const RankMemory& m) {
    return within(m.device.mapped_peak_bytes + plan.overhead_bytes, plan.device_capacity_bytes) &&
           within(m.host.mapped_peak_bytes, plan.host_capacity_bytes);
  });
}

/// The number of each rank's group within a family; -1 - rank for one that is in none.
std::vector<std::int64_t> group_numbers(const GroupFamily& family, Rank num_ranks) {
  std::vector<std::int64_t> out;
  for (Rank r = 0; r < num_ranks; ++r) out.push_back(-1 - std::int64_t{r});
  for (std::size_t g = 0; g < family.groups.size(); ++g)
    for (const Rank r : family.groups[g]) out[static_cast<std::size_t>(r)] = static_cast<std::int64_t>(g);
  return out;
}

/// `totals`: over all steps, rows without a step.
Json traffic_json(const Plan& plan, const std::vector<RankTraffic>& by_rank, bool totals) {
  // Rows of one key: (group number, counts in the order first seen) → ranks.
  struct Row {
    std::int64_t group;
    TrafficCount count;
    std::vector<Rank> ranks;
  };
  std::vector<std::vector<std::int64_t>> number_of;
  for (const GroupFamily& family : plan.groups) number_of.push_back(group_numbers(family, plan.num_ranks()));
  std::map<TrafficKey, std::vector<Row>> table;
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    for (const auto& [key, count] : by_rank[r]) {
      const std::int64_t group = number_of[static_cast<std::size_t>(key.group)][r];
      auto& rows = table[key];
      const auto same = std::find_if(rows.rbegin(), rows.rend(),  // neighbours are in one group as often as not
                                     [&, &n = count](const Row& row) { return row.group == group && row.count == n; });
      Row& row = same != rows.rend() ? *same : rows.emplace_back(Row{group, count, {}});
      row.ranks.push_back(static_cast<Rank>(r));
    }
  Json out = Json::array();
  for (const auto& [key, rows] : table)
    for (const Row& row : rows) {
      Json line = Json::object();
      if (!totals) line["step"] = key.step;
      line["phase"] = phase_name(plan, key.phase);
      line["group"] = plan.groups[static_cast<std::size_t>(key.group)].name;
      line["op"] = name_of(key.op);
      line["ranks"] = row.ranks;
      line["calls_per_rank"] = row.count.calls;
      line["payload_bytes_per_rank"] = row.count.payload_bytes;
      line["padding_bytes_per_rank"] = row.count.padding_bytes;
      line["wire_bytes_per_rank"] = row.count.wire_bytes;
      out.push_back(std::move(line));
    }
  return out;
}

Json metrics_json(const Trace& trace) {
  Json out = Json::array();
  for (const StepMetrics& m : trace.metrics) {
    Json row = {{"step", m.step}};
    for (const auto& [name, value] : m.values) row[name] = value;
    out.push_back(row);
  }
  return out;
}

/// What is alive at the peak of the phase that is fullest, and of the weight update, tensor by tensor.
Json live_json(const Plan& plan, Rank rank, const Json& memory) {
  const RankMemory walked = static_memory(plan, rank);
  Json out = Json::array();
  std::set<std::int32_t> phases = {plan.phase_index("sync"),
                                   plan.phase_index(memory.at("peak_phase").get<std::string>())};
  for (const std::int32_t index : phases) {
    const auto phase = static_cast<std::int16_t>(index);
    const auto peak = walked.device.phase_peaks.find(phase);
    if (index < 0 || peak == walked.device.phase_peaks.end()) continue;
    Json tensors = Json::array();
    for (const LiveTensors& t : live_tensors_at_peak(plan, rank, phase)) {
      const auto section = std::ranges::find(plan.program(rank).sections, t.section, &Section::name);
      tensors.push_back({{"name", t.name},
                         {"process", name_of(process_of(*section))},
                         {"category", name_of(t.category)},
                         {"buffers", t.buffers},
                         {"bytes", t.bytes}});
    }
    out.push_back({{"phase", phase_name(plan, phase)},
                   {"rank", rank},
                   {"peak_bytes", peak->second.peak_bytes},
                   {"tensors", std::move(tensors)}});
  }
  return out;
}

Json links_json(const Trace& trace) {
  std::int64_t all_ns = 0;
  for (const PhaseTotal& t : trace.phase_totals)
    if (t.phase == PhaseTotal::iteration) all_ns = std::max(all_ns, t.stays.total_ns);
  Json out = Json::array();
  for (const LinkTraffic& l : trace.links)
    out.push_back({{"name", l.name},
                   {"kind", l.kind},
                   {"links", l.links},
                   {"capacity_bytes_per_second", l.capacity_bytes_per_s},
                   {"bytes", l.bytes},
                   {"busy_seconds", static_cast<double>(l.busy_ns) * ns},
                   {"peak_utilisation", l.peak},
                   {"mean_utilisation", all_ns > 0 ? l.full_ns / static_cast<double>(all_ns) : 0.0}});
  return out;
}

/// Seconds of an iteration, and what the first one takes more: where roles walk side by side, the trainer waits for the
/// first samples, and engines have nothing to roll out beside the last training.
struct IterationPace {
  double seconds = 0.0, filling = 0.0;
};

/// What the busiest rank does in an iteration while it waits for no other role.
double busiest_seconds(const Plan& plan, const Trace& trace) {
  std::map<Rank, std::int64_t> busy;
  for (const PhaseSpan& p : trace.phases) {
    const PhaseInfo& info = plan.phases[static_cast<std::size_t>(p.phase)];
    if (info.when != When::iteration) continue;
    const bool meets = info.players.size() > 1;
    busy[p.rank] += p.end_ns - p.start_ns - (meets ? std::max<std::int64_t>(0, p.waiting_ns) : 0);
  }
  std::int64_t most = 0;
  for (const auto& [rank, each] : busy) most = std::max(most, each);
  return static_cast<double>(most) * ns;
}

/// Where roles walk at their own pace, no rank sees all of an iteration: one follows another as their last phases do,
/// but for those that a role plays some iterations later.
IterationPace pace_of_roles(const Plan& plan, const Scenario& scenario, const Trace& trace) {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::map<std::int32_t, std::int64_t> ends;
  for (const PhaseSpan& p : trace.phases) {
    const PhaseInfo& info = plan.phases[static_cast<std::size_t>(p.phase)];
    const Player* const player = info.player(plan.role_of(p.rank));
    if (info.when == When::iteration && player != nullptr && player->steps_back == 0)
      begin = std::min(begin, p.start_ns), ends[p.step] = std::max(ends[p.step], p.end_ns);
  }
  if (ends.empty()) return {};
  const double first = static_cast<double>(ends.begin()->second - begin) * ns;
  if (scenario.algorithm.max_staleness == 0)
    return {static_cast<double>(ends.rbegin()->second - begin) * ns /
                static_cast<double>(ends.rbegin()->first - ends.begin()->first + 1),
            0.0};
  const auto [first_step, first_end] = *ends.begin();
  const auto [last_step, last_end] = *ends.rbegin();
  const double steady = last_step > first_step ? static_cast<double>(last_end - first_end) * ns /
                                                     static_cast<double>(last_step - first_step)
                                               : busiest_seconds(plan, trace);
  return {steady, std::max(0.0, first - steady)};
}

/// Names of the bodies that are not written op by op.
Json priced_blocks(const Plan& plan) {
  const auto takes_time = [](const Op& op) {
    return std::ranges::any_of(
        op.prices, [](const PricePoint& p) { return p.seconds + p.seconds_per_pair + p.payload_bytes > 0.0; });
  };
  Json out = Json::array();
  std::set<std::string_view> seen;
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      if (std::ranges::any_of(body.ops, takes_time) && seen.insert(body.name).second) out.push_back(body.name);
  return out;
}

double mfu(const Plan& plan, const Scenario& scenario, const Trace& trace, double train_s) {
  const double peak = scenario.cluster.gpu.peak_flops(std::string(name_of(scenario.train.precision.params)));
  const std::int32_t train = plan.phase_index("train");
  std::int64_t ranks = 0;  // that train
  for (Rank r = 0; train >= 0 && r < plan.num_ranks(); ++r)
    ranks += plan.phases[static_cast<std::size_t>(train)].player(plan.role_of(r)) != nullptr ? 1 : 0;
  const double devices = static_cast<double>(ranks) / static_cast<double>(scenario.cluster.ranks_per_device);
  const double possible = train_s * peak * devices;
  return possible > 0.0 ? trace.model_flops / possible : 0.0;
}

}  // namespace

Json summarize(const Plan& plan, const Scenario& scenario, const Trace& trace) {
  auto totals = totals_of(trace);
  const Total iterations = totals[PhaseTotal::iteration];
  const std::int64_t steps = iterations.most_times;
  const IterationPace pace =
      plan.roles.size() == 1 ? IterationPace{steps > 0 ? iterations.seconds() / static_cast<double>(steps) : 0.0, 0.0}
                             : pace_of_roles(plan, scenario, trace);
  const double all_s = pace.seconds * static_cast<double>(steps);
  const std::int32_t train = plan.phase_index("train");
  const double train_s = train < 0 ? 0.0 : totals[static_cast<std::int16_t>(train)].seconds();
  std::erase_if(totals, [](const auto& total) { return total.second.ranks == 0; });
  Json memory = memory_json(plan, trace);
  const auto peak_rank = memory.at("peak_rank").get<Rank>();
  Json live = live_json(plan, peak_rank, memory);
  return {
      {"schema", "hotbunk.trace-summary/1"},
      {"source", trace.source},
      {"scenario", scenario.name},
      {"plan_hash", plan_hash(plan)},
      {"priced_blocks", priced_blocks(plan)},
      {"fits", fits(plan, trace)},
      {"steps", steps},
      {"iteration_seconds", pace.seconds},
      {"filling_seconds", pace.filling},
      {"tokens_per_second", all_s > 0.0 ? static_cast<double>(trace.trained_tokens) / all_s : 0.0},
      {"mfu", mfu(plan, scenario, trace, train_s)},
      {"phases", phases_json(plan, trace)},
      {"memory", std::move(memory)},
      {"traffic", traffic_json(plan, trace.traffic, false)},
      {"metrics", metrics_json(trace)},
      {"iteration", total_json(iterations)},
      {"phase_totals", totals_json(plan, totals)},
      {"traffic_totals", traffic_json(plan, trace.traffic_totals, true)},
      {"kept", kept_json(plan, trace, steps)},
      {"timeline", timeline_json(plan, gpu_timeline(plan, trace, peak_rank))},
      {"live_at_peak", std::move(live)},
      {"critical_path", critical_path_json(plan, trace, critical_path(plan, trace, last_recorded_step(plan, trace)))},
      {"links", links_json(trace)}};
}

}  // namespace hotbunk
