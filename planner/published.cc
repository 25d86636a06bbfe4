#include "planner/published.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/file.h"

namespace hotbunk {
namespace {

std::vector<std::string> split(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) cells.emplace_back();
    else if (c != '\r') cells.back() += c;
  }
  return cells;
}

}  // namespace

Result<CsvTable> CsvTable::parse(const std::string& text, const std::string& file) {
  CsvTable table;
  std::size_t begin = 0;
  for (int line = 1; begin < text.size(); ++line) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::vector<std::string> cells = split(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    if (cells.size() == 1 && cells[0].empty()) continue;
    if (table.header_.empty()) {
      table.header_ = std::move(cells);
      continue;
    }
    if (cells.size() != table.header_.size())
      return fail(
          Diagnostic{.code = "E106",
                     .message = fmt::format("row has {} cells, the header {}", cells.size(), table.header_.size()),
                     .where = {file, line, 1},
                     .notes = {},
                     .help = "one comma-separated cell per column"});
    table.cells_.push_back(std::move(cells));
  }
  return table;
}

Result<CsvTable> CsvTable::read(const std::filesystem::path& path) {
  auto text = read_file(path, std::int64_t{64} << 20);
  if (!text) return fail(text.error());
  return parse(*text, path.string());
}

bool CsvTable::has(const std::string& column) const {
  return std::find(header_.begin(), header_.end(), column) != header_.end();
}

const std::string& CsvTable::Row::text(const std::string& column) const {
  static const std::string none;
  const auto at = std::find(table->header_.begin(), table->header_.end(), column);
  return at == table->header_.end() ? none
                                    : table->cells_[index][static_cast<std::size_t>(at - table->header_.begin())];
}

double CsvTable::Row::number(const std::string& column, double otherwise) const {
  const std::string& cell = text(column);
  double value = 0.0;
  const auto [stop, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  return error == std::errc{} && std::isfinite(value) ? value : otherwise;
}

std::int64_t CsvTable::Row::integer(const std::string& column, std::int64_t otherwise) const {
  const double value = number(column, static_cast<double>(otherwise));
  return std::abs(value) < 9e15 ? static_cast<std::int64_t>(value) : otherwise;
}

}  // namespace hotbunk
