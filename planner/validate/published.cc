#include "planner/validate/published.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/file.h"

namespace hotbunk {
namespace {

std::string trimmed(const std::string& cell) {
  const auto begin = cell.find_first_not_of(" \t");
  return begin == std::string::npos ? "" : cell.substr(begin, cell.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string> split(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) cells.emplace_back();
    else if (c != '\r') cells.back() += c;
  }
  for (std::string& cell : cells) cell = trimmed(cell);
  return cells;
}

/// The number that a cell begins with, and what follows it.
struct Leading {
  double value = 0.0;
  bool found = false;
  std::string rest;
};
Leading leading_number(const std::string& cell) {
  Leading out;
  const auto [stop, error] = std::from_chars(cell.data(), cell.data() + cell.size(), out.value);
  out.found = error == std::errc{} && std::isfinite(out.value);
  if (out.found) out.rest.assign(stop, cell.data() + cell.size());
  return out;
}

}  // namespace

Result<CsvTable> CsvTable::parse(const std::string& text, const std::string& file) {
  CsvTable table;
  Diagnostics ragged;
  table.file_ = file;
  // A spreadsheet's byte order mark is no part of the first column's name.
  std::size_t begin = text.rfind("\xef\xbb\xbf", 0) == 0 ? 3 : 0;
  for (int line = 1; begin < text.size(); ++line) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::vector<std::string> cells = split(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    if (cells.size() == 1 && cells[0].empty()) continue;
    if (table.header_.empty()) {
      table.header_ = std::move(cells);
      table.header_line_ = line;
      continue;
    }
    if (cells.size() != table.header_.size())
      ragged.push_back({.code = "E106",
                        .message = fmt::format("row has {} cells, the header {}", cells.size(), table.header_.size()),
                        .where = {file, line, 1},
                        .notes = {},
                        .help = "one comma-separated cell per column, in quotes where it has a comma"});
    else table.cells_.push_back(std::move(cells));
  }
  if (!ragged.empty()) return fail(std::move(ragged));
  if (table.header_.empty())
    return fail(Diagnostic{.code = "E107",
                           .message = "the table has no header line",
                           .where = {file, 1, 1},
                           .notes = {},
                           .help = "the first line names the columns, as in data/published/ of the same file name"});
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

Status CsvTable::require(const std::vector<std::string>& columns) const {
  Diagnostics missing;
  for (const std::string& column : columns) {
    if (has(column)) continue;
    const std::string near = nearest_name(column, header_);
    missing.push_back({.code = "E107",
                       .message = fmt::format("the table has no column '{}'", column),
                       .where = {file_, header_line_, 1},
                       .notes = {fmt::format("its columns: {}", fmt::join(header_, ", "))},
                       .help = near.empty() ? fmt::format("add the column '{}'", column)
                                            : fmt::format("add the column, or rename '{}' to '{}'", near, column)});
  }
  if (!missing.empty()) return fail(std::move(missing));
  return {};
}

const std::string& CsvTable::Row::text(const std::string& column) const {
  static const std::string none;
  const auto at = std::find(table->header_.begin(), table->header_.end(), column);
  return at == table->header_.end() ? none
                                    : table->cells_[index][static_cast<std::size_t>(at - table->header_.begin())];
}

double CsvTable::Row::number(const std::string& column, double otherwise) const {
  const Leading number = leading_number(text(column));
  return number.found ? number.value : otherwise;
}

std::int64_t CsvTable::Row::integer(const std::string& column, std::int64_t otherwise) const {
  const double value = number(column, static_cast<double>(otherwise));
  return std::abs(value) < 9e15 ? static_cast<std::int64_t>(value) : otherwise;
}

void CellReader::refuse(std::string why) {
  if (why_.empty()) why_ = why.empty() ? "no micro-batches and chunks of the layout divide" : std::move(why);
}

std::int64_t CellReader::count(const std::string& column, std::int64_t least, std::int64_t most) {
  const std::string& cell = text(column);
  const Leading number = leading_number(cell);
  const bool footnote = number.rest.empty() || number.rest.rfind("[^", 0) == 0;
  if (number.found && footnote && number.value >= static_cast<double>(least) &&
      number.value <= static_cast<double>(most) && number.value == std::floor(number.value))
    return static_cast<std::int64_t>(number.value);
  refuse(fmt::format("{} '{}' is no whole number from {} to {}", column, cell, least, most));
  return std::max<std::int64_t>(least, 1);
}

std::int64_t CellReader::count_or_one(const std::string& column) {
  const std::string& cell = text(column);
  return cell == "-" || cell == "n/a" || cell == "N/A" ? 1 : count(column);
}

double CellReader::measured(const std::string& column) {
  const std::string& cell = text(column);
  const Leading number = leading_number(cell);
  // A unit, a percent sign or a footnote may follow; more digits ("17,160") would be another number.
  const bool ends = number.rest.empty() || number.rest.find_first_of(" %[") == 0;
  if (number.found && ends && number.value > 1e-9 && number.value < 1e15) return number.value;
  refuse(cell.empty() ? fmt::format("nothing measured: {} is empty", column)
                      : fmt::format("nothing measured: {} '{}'", column, cell));
  return 1.0;
}

std::int64_t CellReader::share(const std::string& what, std::int64_t whole, std::initializer_list<std::int64_t> by) {
  // In double: the product of a few counts may pass 64 bits.
  double ways = 1.0;
  for (std::int64_t n : by) ways *= static_cast<double>(n);
  if (ways >= 1.0 && std::fmod(static_cast<double>(whole), ways) == 0.0)
    return static_cast<std::int64_t>(static_cast<double>(whole) / ways);
  refuse(fmt::format("{} {} do not divide by {}", whole, what, fmt::join(by, " x ")));
  return 1;
}

void CellReader::layout(std::int64_t ranks, std::initializer_list<std::int64_t> degrees) {
  double product = 1.0;
  for (std::int64_t n : degrees) product *= static_cast<double>(n);
  if (product != static_cast<double>(ranks))
    refuse(fmt::format("{} = {:.0f} ranks, the row has {} GPUs", fmt::join(degrees, " x "), product, ranks));
}

}  // namespace hotbunk
