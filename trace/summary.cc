#include "trace/summary.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr double ns = 1e-9;  // seconds

struct Interval {
  std::int64_t start_ns = INT64_MAX, end_ns = INT64_MIN;
  void cover(const PhaseSpan& p) { start_ns = std::min(start_ns, p.start_ns), end_ns = std::max(end_ns, p.end_ns); }
  double seconds() const { return static_cast<double>(end_ns - start_ns) * ns; }
};

/// When the ranks together were in each phase of each step, and in the iterations.
struct Times {
  std::map<std::pair<std::int32_t, std::int16_t>, Interval> phases;  // by step and phase
  std::map<std::int32_t, Interval> iterations;                       // by step

  Times(const Plan& plan, const Trace& trace) {
    for (const PhaseSpan& p : trace.phases) {
      phases[{p.step, p.phase}].cover(p);
      if (plan.phases[static_cast<std::size_t>(p.phase)].when == When::iteration) iterations[p.step].cover(p);
    }
  }
  double iteration_seconds() const {
    double sum = 0.0;
    for (const auto& [step, interval] : iterations) sum += interval.seconds();
    return iterations.empty() ? 0.0 : sum / static_cast<double>(iterations.size());
  }
};

std::string phase_name(const Plan& plan, std::int16_t phase) {
  return phase < 0 ? "" : plan.phases[static_cast<std::size_t>(phase)].name;
}

Json phases_json(const Plan& plan, const Times& times) {
  std::vector<std::tuple<std::int32_t, std::int64_t, std::int16_t, Interval>> order;
  for (const auto& [key, interval] : times.phases)
    order.emplace_back(key.first, interval.start_ns, key.second, interval);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<1>(a), std::get<0>(a), std::get<2>(a)) <
           std::tie(std::get<1>(b), std::get<0>(b), std::get<2>(b));
  });
  Json rows = Json::array();
  for (const auto& [step, start_ns, phase, interval] : order)
    rows.push_back({{"step", step},
                    {"name", phase_name(plan, phase)},
                    {"start", static_cast<double>(start_ns) * ns},
                    {"seconds", interval.seconds()}});
  return rows;
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

Json memory_json(const Plan& plan, const Trace& trace) {
  std::size_t peak_rank = 0;
  std::int64_t mapped = 0;
  Json by_rank = Json::array();
  for (std::size_t r = 0; r < trace.memory.size(); ++r) {
    const SpaceMemory& device = trace.memory[r].device;
    if (device.peak_bytes > trace.memory[peak_rank].device.peak_bytes) peak_rank = r;
    mapped = std::max(mapped, device.mapped_peak_bytes);
    by_rank.push_back(rank_json(plan, r, trace.memory[r]));
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

/// The number of a rank's group within a family, or -1 - rank for one that is in none.
std::int64_t group_number(const GroupFamily& family, Rank rank) {
  for (std::size_t g = 0; g < family.groups.size(); ++g)
    if (std::find(family.groups[g].begin(), family.groups[g].end(), rank) != family.groups[g].end())
      return static_cast<std::int64_t>(g);
  return -1 - std::int64_t{rank};
}

Json traffic_json(const Plan& plan, const Trace& trace) {
  // Rows of one key: (group number, counts in the order first seen) → ranks.
  struct Row {
    std::int64_t group;
    TrafficCount count;
    std::vector<Rank> ranks;
  };
  std::vector<std::vector<std::int64_t>> number_of(plan.groups.size());
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (Rank r = 0; r < plan.num_ranks(); ++r) number_of[f].push_back(group_number(plan.groups[f], r));
  std::map<TrafficKey, std::vector<Row>> table;
  for (std::size_t r = 0; r < trace.traffic.size(); ++r)
    for (const auto& [key, count] : trace.traffic[r]) {
      const std::int64_t group = number_of[static_cast<std::size_t>(key.group)][r];
      auto& rows = table[key];
      const auto same = std::find_if(rows.begin(), rows.end(),
                                     [&](const Row& row) { return row.group == group && row.count == count; });
      Row& row = same != rows.end() ? *same : rows.emplace_back(Row{group, count, {}});
      row.ranks.push_back(static_cast<Rank>(r));
    }
  Json out = Json::array();
  for (const auto& [key, rows] : table)
    for (const Row& row : rows)
      out.push_back({{"step", key.step},
                     {"phase", phase_name(plan, key.phase)},
                     {"group", plan.groups[static_cast<std::size_t>(key.group)].name},
                     {"op", name_of(key.op)},
                     {"ranks", row.ranks},
                     {"calls_per_rank", row.count.calls},
                     {"payload_bytes_per_rank", row.count.payload_bytes},
                     {"padding_bytes_per_rank", row.count.padding_bytes},
                     {"wire_bytes_per_rank", row.count.wire_bytes}});
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

double mfu(const Plan& plan, const Scenario& scenario, const Trace& trace, const Times& times) {
  const std::int32_t train = plan.phase_index("train");
  double seconds = 0.0;
  for (const auto& [key, interval] : times.phases)
    if (key.second == train) seconds += interval.seconds();
  const double peak = scenario.cluster.gpu.peak_flops(std::string(name_of(scenario.train.precision.params)));
  const double devices = static_cast<double>(plan.num_ranks()) / static_cast<double>(scenario.cluster.ranks_per_device);
  const double possible = seconds * peak * devices;
  return possible > 0.0 ? trace.model_flops / possible : 0.0;
}

}  // namespace

Json summarize(const Plan& plan, const Scenario& scenario, const Trace& trace) {
  const Times times(plan, trace);
  const double iteration_s = times.iteration_seconds();
  const double all_s = iteration_s * static_cast<double>(times.iterations.size());
  return {{"schema", "hotbunk.trace-summary/1"},
          {"source", trace.source},
          {"scenario", scenario.name},
          {"plan_hash", plan_hash(plan)},
          {"fits", fits(plan, trace)},
          {"steps", times.iterations.size()},
          {"iteration_seconds", iteration_s},
          {"tokens_per_second", all_s > 0.0 ? static_cast<double>(trace.trained_tokens) / all_s : 0.0},
          {"mfu", mfu(plan, scenario, trace, times)},
          {"phases", phases_json(plan, times)},
          {"memory", memory_json(plan, trace)},
          {"traffic", traffic_json(plan, trace)},
          {"metrics", metrics_json(trace)}};
}

}  // namespace hotbunk
