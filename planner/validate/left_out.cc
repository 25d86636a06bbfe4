// Predictions by constants that were fitted without the row: made by scripts/fit_profiles.py, because a refit takes
// minutes, and shown beside the fitted ones.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "planner/validate/validate_tables.h"

namespace hotbunk {

double LeftOut::mean_abs_error() const {
  double sum = 0.0;
  for (const PredictedRow& r : rows) sum += std::abs(r.error());
  return rows.empty() ? 0.0 : sum / static_cast<double>(rows.size());
}

namespace {

/// "all rows of 70B" -> "all rows of a model", "the configuration 70B to 8" -> "all rows of a configuration".
std::string way_of(const std::string& without) {
  return without.starts_with("all rows of ")         ? "all rows of a model"
         : without.starts_with("the configuration ") ? "all rows of a configuration"
                                                     : without;
}

}  // namespace

Status add_left_out(const std::filesystem::path& file, std::vector<ValidationTable>& tables) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return {};
  const auto csv = CsvTable::read(file);
  if (!csv) return fail(csv.error());
  if (auto has = csv->require({"table", "row", "without", "fitted", "predicted"}); !has) return fail(has.error());
  constexpr double same = 0.01;  // what a refit of other constants may move a row by
  for (std::size_t i = 0; i < csv->size(); ++i) {
    const CsvTable::Row row = csv->row(i);
    const auto table = std::ranges::find(tables, row.text("table"), &ValidationTable::name);
    if (table == tables.end()) continue;
    const auto label = [&](std::string text) {
      std::ranges::replace(text, ',', ';');
      return text;
    };
    const auto shown =
        std::ranges::find_if(table->rows, [&](const PredictedRow& r) { return label(r.label) == row.text("row"); });
    if (shown == table->rows.end()) continue;  // another folder's table of this name
    table->left_out.how = way_of(row.text("without"));
    if (std::abs(row.number("fitted") / shown->predicted - 1.0) > same)
      table->left_out.skipped.push_back(
          {shown->label, fmt::format("stale: fitted then {:.4g}, now {:.4g}; scripts/fit_profiles.py --write",
                                     row.number("fitted"), shown->predicted)});
    else table->left_out.rows.push_back({shown->label, shown->measured, row.number("predicted")});
  }
  return {};
}

}  // namespace hotbunk
