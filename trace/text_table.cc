#include "trace/text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace hotbunk {
namespace {

/// Columns on screen: code points, as our cells hold no wide or combining ones.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

}  // namespace

std::string paint(const std::string& text, const char* ansi, bool colour) {
  return colour ? fmt::format("\x1b[{}m{}\x1b[0m", ansi, text) : text;
}

TextTable::TextTable(std::vector<std::string> header, std::size_t left) : header_(std::move(header)), left_(left) {}

void TextTable::add(std::vector<std::string> cells) {
  cells.resize(header_.size());
  rows_.push_back(std::move(cells));
}

std::string TextTable::str(bool colour) const {
  std::vector<std::size_t> widths;
  for (const std::string& cell : header_) widths.push_back(width_of(cell));
  for (const auto& row : rows_)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text = " ";
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string blanks(widths[c] - width_of(cells[c]), ' ');
      text += c == 0 ? " " : "  ";
      text += c < left_ ? cells[c] + blanks : blanks + cells[c];
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::string out = paint(line(header_), "2", colour) + '\n';
  for (const auto& row : rows_) out += line(row) + '\n';
  return out;
}

}  // namespace hotbunk
