// Tables for terminals: columns as wide as their widest cell, numbers to the right.
#pragma once
#include <string>
#include <vector>

namespace hotbunk {

class TextTable {
 public:
  /// The first `left` columns are text, aligned left; the others are numbers, aligned right.
  explicit TextTable(std::vector<std::string> header, std::size_t left = 1);
  void add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  /// Each line indented by two blanks and ended by '\n'; the header dim when `colour`.
  std::string str(bool colour = false) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
  std::size_t left_;
};

/// ANSI attributes around a text: "1" bold, "2" dim, "31" red, "32" green; the text itself without colour.
std::string paint(const std::string& text, const char* ansi, bool colour);

}  // namespace hotbunk
