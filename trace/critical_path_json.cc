#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "graph/catalogue.h"
#include "trace/critical_path.h"
#include "trace/static_memory.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_critical = 14;  // kinds of ops, and of waits, listed

constexpr double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

}  // namespace

Json critical_path_json(const Plan& plan, const Trace& trace, const CriticalPath& path) {
  if (path.spans.empty()) return nullptr;
  Json phases = Json::array(), ops = Json::array();
  for (const CriticalPath::PhaseShare& p : path.phases)
    phases.push_back({{"phase", plan.phases[static_cast<std::size_t>(p.phase)].name},
                      {"elapsed_s", seconds(p.elapsed_ns)},
                      {"busy_s", seconds(p.busy_ns)},
                      {"waiting_s", seconds(p.waiting_ns())}});
  std::map<std::pair<std::string, std::string_view>, std::pair<std::int64_t, std::int64_t>> alike;  // ns, times
  for (std::size_t i = 0; i < path.spans.size(); ++i) {
    const Span& s = trace.spans[path.spans[i]];
    // A run of a block, or several, says nothing of bytes: it is not of one kind.
    const bool says_what = s.bytes > 0 || s.flops > 0.0 || is_communication(s.kind) || is_memory(s.kind);
    const std::string_view kind = says_what ? name_of(s.kind) : "several";
    auto& [ns, times] = alike[{without_numbers(trace.names[static_cast<std::size_t>(s.name)]), kind}];
    ns += path.own_ns[i], ++times;
  }
  std::vector<std::pair<std::int64_t, Json>> order;
  for (const auto& [key, sum] : alike)
    order.emplace_back(
        sum.first,
        Json{{"name", key.first}, {"kind", key.second}, {"times", sum.second}, {"own_s", seconds(sum.first)}});
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (auto& [ns, row] : order)
    if (ops.size() < most_critical) ops.push_back(std::move(row));
  // What lies between, by what comes next.
  std::map<std::pair<std::string, std::int16_t>, std::pair<std::int64_t, std::int64_t>> before;  // ns, times
  for (std::size_t i = 0; i < path.spans.size(); ++i) {
    if (path.idle_ns[i] == 0) continue;
    const Span& s = trace.spans[path.spans[i]];
    auto& [ns, times] = before[{without_numbers(trace.names[static_cast<std::size_t>(s.name)]), s.phase}];
    ns += path.idle_ns[i], ++times;
  }
  std::vector<std::pair<std::int64_t, Json>> idle;
  for (const auto& [key, sum] : before)
    idle.emplace_back(sum.first, Json{{"name", key.first},
                                      {"phase", plan.phases[static_cast<std::size_t>(key.second)].name},
                                      {"times", sum.second},
                                      {"idle_s", seconds(sum.first)}});
  if (path.idle_after_ns > 0)
    idle.emplace_back(
        path.idle_after_ns,
        Json{{"name", "(the end)"}, {"phase", ""}, {"times", 1}, {"idle_s", seconds(path.idle_after_ns)}});
  std::stable_sort(idle.begin(), idle.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  Json waits = Json::array();
  for (auto& [ns, row] : idle)
    if (waits.size() < most_critical) waits.push_back(std::move(row));
  return {{"step", path.step},
          {"elapsed_s", seconds(path.elapsed_ns)},
          {"busy_s", seconds(path.busy_ns)},
          {"phases", phases},
          {"ops", ops},
          {"waits", waits}};
}

}  // namespace hotbunk
