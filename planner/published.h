// Published measurements as tables: comma-separated files with a header line, one number per cell.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

class CsvTable {
 public:
  struct Row {
    const CsvTable* table = nullptr;
    std::size_t index = 0;
    /// The cell as text; "" when the column is absent.
    const std::string& text(const std::string& column) const;
    /// The leading number of a cell ("661[^note]" is 661); `otherwise` when it has none.
    double number(const std::string& column, double otherwise = 0.0) const;
    std::int64_t integer(const std::string& column, std::int64_t otherwise = 0) const;
  };

  /// E106 with the line when a row has another number of cells than the header.
  static Result<CsvTable> parse(const std::string& text, const std::string& file);
  static Result<CsvTable> read(const std::filesystem::path&);

  std::size_t size() const { return cells_.size(); }
  Row row(std::size_t i) const { return {this, i}; }
  bool has(const std::string& column) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> cells_;
};

}  // namespace hotbunk
