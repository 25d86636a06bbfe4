// Published measurements as tables: comma-separated files with a header line, one number per cell.
#pragma once
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

class CsvTable {
 public:
  struct Row {
    const CsvTable* table = nullptr;
    std::size_t index = 0;
    /// The cell without surrounding spaces; "" when the column is absent.
    const std::string& text(const std::string& column) const;
    /// The leading number of a cell ("661[^note]" is 661); `otherwise` when it has none.
    double number(const std::string& column, double otherwise = 0.0) const;
    std::int64_t integer(const std::string& column, std::int64_t otherwise = 0) const;
  };

  /// E106 with the line of every row that has another number of cells than the header, E107 without a header line.
  static Result<CsvTable> parse(const std::string& text, const std::string& file);
  static Result<CsvTable> read(const std::filesystem::path&);

  std::size_t size() const { return cells_.size(); }
  Row row(std::size_t i) const { return {this, i}; }
  bool has(const std::string& column) const;
  /// E107 at the header line for every column that is not there, with the nearest that is.
  Status require(const std::vector<std::string>& columns) const;

 private:
  std::string file_;
  int header_line_ = 0;
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> cells_;
};

/// Reads the cells that a prediction needs. The first that is of no use is the row's reason to be out of scope; reading
/// goes on with 1, so that a row's cells are read in one place and judged once.
class CellReader {
 public:
  explicit CellReader(CsvTable::Row row) : row_(row) {}

  /// A whole number; the bounds keep products of a few of them in 64 bits.
  std::int64_t count(const std::string& column, std::int64_t least = 1, std::int64_t most = 1 << 20);
  /// The same, 1 where the cell says that the dimension is not used: "-", "n/a".
  std::int64_t count_or_one(const std::string& column);
  /// What was measured: above zero and of a size that a measurement has. A unit, % or a footnote may follow.
  double measured(const std::string& column);
  /// whole / (the product of `by`), which must divide it.
  std::int64_t share(const std::string& what, std::int64_t whole, std::initializer_list<std::int64_t> by);
  /// The product of the degrees must be the row's ranks.
  void layout(std::int64_t ranks, std::initializer_list<std::int64_t> degrees);
  const std::string& text(const std::string& column) const { return row_.text(column); }

  void refuse(std::string why);
  bool usable() const { return why_.empty(); }
  const std::string& why() const { return why_; }

 private:
  CsvTable::Row row_;
  std::string why_;
};

}  // namespace hotbunk
