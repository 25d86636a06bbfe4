#include "trace/spread.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/format.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view phase_prefix = "phase ";

std::string with_unit(const std::string& name, double value, bool phase) {
  if (phase || name.ends_with("_seconds")) return format_seconds(value);
  if (name.ends_with("_bytes")) return format_bytes(value);
  return fmt::format("{:.4g}", value);
}

}  // namespace

DrawnFigures figures_of(const Json& summary) {
  DrawnFigures out;
  const auto add = [&](std::string name, double value) { out.figures.push_back({std::move(name), value}); };
  const Json& memory = summary.at("memory");
  for (const char* key : {"iteration_seconds", "tokens_per_second"}) add(key, summary.at(key).get<double>());
  for (const char* key : {"peak_bytes", "mapped_peak_bytes"}) add(key, memory.at(key).get<double>());
  double host = 0.0;
  for (const Json& rank : memory.at("by_rank")) host = std::max(host, rank.at("host").at("peak_bytes").get<double>());
  add("host_peak_bytes", host);
  for (const Json& phase : summary.at("phase_totals"))
    add(fmt::format("{}{}", phase_prefix, phase.at("name").get<std::string>()), phase.at("mean").get<double>());
  return out;
}

Json spread_json(const std::vector<DrawnFigures>& draws, std::int64_t first_seed) {
  HB_CHECK(draws.size() >= 2, "a spread of {} draws", draws.size());
  const auto count = static_cast<double>(draws.size());
  Json figures = Json::array(), phases = Json::array();
  for (std::size_t f = 0; f < draws.front().figures.size(); ++f) {
    const std::string& name = draws.front().figures[f].name;
    double sum = 0.0, least = INFINITY, most = -INFINITY;
    for (const DrawnFigures& draw : draws) {
      HB_CHECK(f < draw.figures.size() && draw.figures[f].name == name, "a draw has no figure {}", name);
      const double x = draw.figures[f].value;
      sum += x, least = std::min(least, x), most = std::max(most, x);
    }
    const double mean = std::clamp(sum / count, least, most);  // of equal values exactly that
    double squares = 0.0;
    for (const DrawnFigures& draw : draws) squares += (draw.figures[f].value - mean) * (draw.figures[f].value - mean);
    const bool phase = name.starts_with(phase_prefix);
    (phase ? phases : figures)
        .push_back({{"name", phase ? name.substr(phase_prefix.size()) : name},
                    {"mean", mean},
                    {"standard_deviation", std::sqrt(squares / (count - 1.0))},
                    {"least", least},
                    {"most", most}});
  }
  return {{"first", first_seed}, {"count", draws.size()}, {"figures", figures}, {"phases", phases}};
}

std::string render_spread(const Json& spread, bool colour) {
  const auto first = spread.at("first").get<std::int64_t>(), count = spread.at("count").get<std::int64_t>();
  TextTable table({"figure", "mean", "± deviation", "", "least", "most"});
  for (const char* section : {"figures", "phases"})
    for (const Json& row : spread.at(section)) {
      const bool phase = section == std::string_view("phases");
      const auto name = row.at("name").get<std::string>();
      const double mean = row.at("mean").get<double>(), deviation = row.at("standard_deviation").get<double>();
      const auto text = [&](double x) { return with_unit(name, x, phase); };
      table.add({name, text(mean), text(deviation),
                 fmt::format("{:.1f} %", mean > 0.0 ? 100.0 * deviation / mean : 0.0),
                 text(row.at("least").get<double>()), text(row.at("most").get<double>())});
    }
  return fmt::format("\nSeeds {} to {}: {} draws of lengths, mean ± standard deviation of one draw\n{}", first,
                     first + count - 1, count, table.str(colour));
}

}  // namespace hotbunk
