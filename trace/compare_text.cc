#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "trace/compare.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t shown_differences = 40;

std::string percent(double share) { return fmt::format("{:+.1f} %", 100.0 * share); }

std::string difference_table(const Comparison& c, bool colour) {
  TextTable table({"rank", "step", "phase", "what", c.a_source, c.b_source, "difference"}, 4);
  for (std::size_t i = 0; i < std::min(c.differences.size(), shown_differences); ++i) {
    const Difference& d = c.differences[i];
    table.add({fmt::format("{}", d.rank), d.step < 0 ? "all" : fmt::format("{}", d.step),
               d.phase.empty() ? "all" : d.phase, d.what, format_count(d.a), format_count(d.b),
               fmt::format("{}{}", d.a > d.b ? "+" : "", format_count(d.a - d.b))});
  }
  std::string out = table.str(colour);
  if (c.differences.size() > shown_differences)
    out += fmt::format("  and {} more\n", c.differences.size() - shown_differences);
  return out;
}

/// Phases over all steps, in order of first appearance: what repeats every step is one line.
std::string time_table(const Comparison& c, bool colour) {
  std::vector<std::string> order;
  std::map<std::string, std::array<double, 3>> sums;  // count, a, b
  for (const TimeRow& row : c.times) {
    auto& sum = sums[row.phase];
    if (sum[0] == 0.0) order.push_back(row.phase);
    sum[0] += 1.0, sum[1] += row.a_s, sum[2] += row.b_s;
  }
  TextTable table({"phase", "times", c.a_source, c.b_source, "error"});
  for (const std::string& phase : order) {
    const auto& [count, a_s, b_s] = sums[phase];
    table.add({phase, fmt::format("{:.0f}", count), format_seconds(a_s / count), format_seconds(b_s / count),
               b_s > 0.0 ? percent((a_s - b_s) / b_s) : "-"});
  }
  return table.str(colour);
}

}  // namespace

Json comparison_to_json(const Comparison& c) {
  Json differences = Json::array(), times = Json::array();
  for (const Difference& d : c.differences)
    differences.push_back({{"rank", d.rank},
                           {"step", d.step < 0 ? Json(nullptr) : Json(d.step)},
                           {"phase", d.phase.empty() ? Json(nullptr) : Json(d.phase)},
                           {"what", d.what},
                           {"a", d.a},
                           {"b", d.b}});
  for (const TimeRow& row : c.times)
    times.push_back({{"step", row.step},
                     {"phase", row.phase},
                     {"a_seconds", row.a_s},
                     {"b_seconds", row.b_s},
                     {"error", row.error}});
  return {{"schema", "hotbunk.compare/1"},
          {"a", c.a_source},
          {"b", c.b_source},
          {"equal", c.equal},
          {"numbers_compared", c.numbers_compared},
          {"differences", differences},
          {"times", times},
          {"time_error", {{"mean", c.mean_error}, {"max", c.max_error}, {"total", c.iteration_error}}}};
}

std::string render_comparison(const Comparison& c, bool colour) {
  std::string out;
  if (c.equal)
    out = fmt::format("{}  memory, traffic and ops: all {} numbers are the same in {} and {}\n",
                      paint("equal", "1;32", colour), format_count(c.numbers_compared), c.a_source, c.b_source);
  else
    out = fmt::format("{}  {} of {} numbers of memory, traffic and ops differ\n", paint("not equal", "1;31", colour),
                      format_count(static_cast<std::int64_t>(c.differences.size())), format_count(c.numbers_compared)) +
          difference_table(c, colour);
  if (c.times.empty()) return out;
  out += "\nTime by phase, mean over steps\n" + time_table(c, colour);
  out += fmt::format(
      "error of {} against {}: mean {:.1f} % (weighted by time), max {:.1f} % (phases over 1 %), total {}\n",
      c.a_source, c.b_source, 100.0 * c.mean_error, 100.0 * c.max_error, percent(c.iteration_error));
  return out;
}

}  // namespace hotbunk
