#include "base/diagnostic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <numeric>

#include "base/printable.h"

namespace hotbunk {

std::string render(const Diagnostic& d) {
  std::string out =
      fmt::format("{}[{}]: {}\n", d.severity == Severity::error ? "error" : "warning", d.code, printable(d.message));
  if (!d.where.file.empty()) {
    out += fmt::format("  --> {}", printable_line(d.where.file));
    if (d.where.line > 0) out += fmt::format(":{}", d.where.line);
    if (d.where.line > 0 && d.where.column > 0) out += fmt::format(":{}", d.where.column);
    out += '\n';
  }
  for (const auto& note : d.notes) out += fmt::format("   = note: {}\n", printable(note));
  if (!d.help.empty()) out += fmt::format("   = help: {}\n", printable(d.help));
  return out;
}

std::string render(const Diagnostics& all) {
  std::string out;
  for (const auto& d : all) out += render(d);
  return out;
}

namespace {

/// Levenshtein distance, case-insensitive; O(|a| |b|).
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const bool same =
          std::tolower(static_cast<unsigned char>(a[i])) == std::tolower(static_cast<unsigned char>(b[j]));
      const std::size_t replace = diagonal + (same ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j + 1] + 1, row[j] + 1, replace});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_name(const std::string& found, const std::vector<std::string>& candidates) {
  if (found.size() > 256) return "";
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, found.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const auto [shorter, longer] = std::minmax({found.size(), candidate.size()});
    if (longer - shorter >= best_distance) continue;  // the distance is at least that
    const std::size_t distance = edit_distance(found, candidate);
    if (distance < best_distance) best_distance = distance, best = candidate;
  }
  return best;
}

}  // namespace hotbunk
