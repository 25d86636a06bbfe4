// How far figures of a simulation scatter with what is drawn: several summaries of one plan side by side.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace hotbunk {

/// What one draw comes to, of its summary (trace/summary.h), by name: iteration_seconds, tokens_per_second, peak_bytes,
/// mapped_peak_bytes, host_peak_bytes (of the fullest rank), and each phase's mean seconds as "phase NAME".
struct DrawnFigures {
  struct Figure {
    std::string name;
    double value = 0.0;
  };
  std::vector<Figure> figures;
};
DrawnFigures figures_of(const nlohmann::ordered_json& summary);

/// {"first": seed of the first draw, "count": draws, "figures": […], "phases": […]}; each row has name, mean,
/// standard_deviation (of one draw: over count - 1; the mean's own is smaller by the root of count), least and most.
/// At least two draws, whose figures have the same names.
nlohmann::ordered_json spread_json(const std::vector<DrawnFigures>& draws, std::int64_t first_seed);
/// That as a table.
std::string render_spread(const nlohmann::ordered_json& spread, bool colour);

}  // namespace hotbunk
