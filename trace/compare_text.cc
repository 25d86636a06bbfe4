#include <fmt/format.h>

#include <algorithm>
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
    table.add({d.rank < 0 ? "all" : fmt::format("{}", d.rank), d.step < 0 ? "all" : fmt::format("{}", d.step),
               d.phase.empty() ? "all" : d.phase, d.what, format_count(d.a), format_count(d.b),
               fmt::format("{}{}", d.a > d.b ? "+" : "", format_count(d.a - d.b))});
  }
  std::string out = table.str(colour);
  if (c.differences.size() > shown_differences)
    out += fmt::format("  and {} more\n", c.differences.size() - shown_differences);
  return out;
}

/// Phases over all steps: what repeats every step is one line.
std::string time_table(const Comparison& c, bool colour) {
  TextTable table({"phase", "times", c.a_source, c.b_source, "error"});
  for (const TimeTotal& t : c.totals) {
    const auto times = static_cast<double>(t.times);
    table.add(
        {t.phase, format_count(t.times), format_seconds(t.a_s / times), format_seconds(t.b_s / times), error_text(t)});
  }
  return table.str(colour);
}

}  // namespace

std::string error_text(const TimeTotal& t) { return t.b_s > 0.0 ? percent((t.a_s - t.b_s) / t.b_s) : "-"; }

Json comparison_to_json(const Comparison& c) {
  Json differences = Json::array(), times = Json::array(), totals = Json::array(), rounds = Json::array();
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
  for (const TimeTotal& t : c.totals)
    totals.push_back({{"phase", t.phase},
                      {"times", t.times},
                      {"a_seconds", t.a_s},
                      {"b_seconds", t.b_s},
                      {"error", t.b_s > 0.0 ? (t.a_s - t.b_s) / t.b_s : 0.0}});
  for (const RoundsRow& row : c.rounds)
    rounds.push_back({{"phase", row.phase},
                      {"planned", row.planned},
                      {"exchanges", row.exchanges},
                      {"a_rounds", row.a},
                      {"b_rounds", row.b}});
  return {{"schema", "hotbunk.compare/1"},
          {"a", c.a_source},
          {"b", c.b_source},
          {"equal", c.equal},
          {"numbers_compared", c.numbers_compared},
          {"differences", differences},
          {"times", times},
          {"totals", totals},
          {"rounds", rounds},
          {"time_error", {{"mean", c.mean_error}, {"max", c.max_error}, {"total", c.iteration_error}}}};
}

std::string render_verdict(const Comparison& c, bool colour) {
  std::string out;
  if (c.equal)
    out = fmt::format("{}  memory, traffic and ops: all {} numbers are the same in {} and {}\n",
                      paint("equal", "1;32", colour), format_count(c.numbers_compared), c.a_source, c.b_source);
  else
    out = fmt::format("{}  {} of {} numbers of memory, traffic and ops differ\n", paint("not equal", "1;31", colour),
                      format_count(static_cast<std::int64_t>(c.differences.size())), format_count(c.numbers_compared)) +
          difference_table(c, colour);
  // How many it took is what routers make of it: shown, not compared.
  for (const RoundsRow& row : c.rounds) {
    const auto mean = [&](std::int64_t rounds) {
      return static_cast<double>(rounds) / static_cast<double>(std::max<std::int64_t>(1, row.exchanges));
    };
    out += fmt::format("rounds of experts' rows in {}: {} planned, {:.2f} played in {}, {:.2f} in {}, mean of {}\n",
                       row.phase, row.planned, mean(row.a), c.a_source, mean(row.b), c.b_source,
                       format_count(row.exchanges) + " exchanges");
  }
  return out;
}

std::string render_time_error(const Comparison& c) {
  if (c.totals.empty()) return "";
  return fmt::format(
      "error of {} against {}: mean {:.1f} % (weighted by time), max {:.1f} % (phases over 1 %), total {}\n",
      c.a_source, c.b_source, 100.0 * c.mean_error, 100.0 * c.max_error, percent(c.iteration_error));
}

std::string render_comparison(const Comparison& c, bool colour) {
  std::string out = render_verdict(c, colour);
  if (!c.totals.empty()) out += "\nTime by phase, mean over steps\n" + time_table(c, colour) + render_time_error(c);
  return out;
}

}  // namespace hotbunk
