// Predictions beside published measurements, row by row. What is fitted on which rows: docs/validation.md.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

struct PredictedRow {
  std::string label;
  double measured = 0.0, predicted = 0.0;
  /// Signed, relative to the measurement.
  double error() const { return measured != 0.0 ? predicted / measured - 1.0 : 0.0; }
};

struct SkippedRow {
  std::string label, why;
};

/// Another tool's figure on the same rows; errors as fractions, negative: not published.
struct PeerFigure {
  std::string tool;
  double mean_abs_error = -1.0, max_abs_error = -1.0;
};

/// Rows as constants predict them that were found without them: what to expect of a row that nobody fitted.
struct LeftOut {
  std::string how;  // what is left out for each: "all rows of a model", "every row of a system"
  std::vector<PredictedRow> rows;
  std::vector<SkippedRow> skipped;  // that nothing else says anything about; stale ones, whose fit is another by now
  double mean_abs_error() const;
};

struct ValidationTable {
  std::string name, quantity, unit;  // "korthikanti_a100", "iteration time", "s"
  std::string setting;               // what was assumed where the source says nothing
  std::vector<PredictedRow> rows;
  std::vector<SkippedRow> skipped;
  std::vector<PeerFigure> peers;
  LeftOut left_out{};     // of no rows: no constant is fitted on this table, or nobody left parts of it out
  bool in_parts = false;  // the last word of a row's label is a part of the whole (a phase), with figures of its own
  /// The table that has these rows too, and shows them: only what is left out of them is another thing. "": none.
  std::string rows_of{};

  /// In the order in which they first occur; none where the table has no parts.
  std::vector<ValidationTable> parts() const;
  double mean_abs_error() const;
  double max_abs_error() const;
  double bias() const;  // mean signed error
};

struct Validation {
  std::vector<ValidationTable> tables;
  std::vector<std::string> ignored;  // *.csv files that are none of the tables
  Diagnostics unreadable;            // files that are, but without a table in them: E106, E107
};

/// Every table found in `data` (names and columns of data/published/). A file with a ragged row or without a column
/// that is needed is named in `unreadable`, the others are predicted; an error when that leaves none, E101 when the
/// folder has none of them. A row is never lost: it is predicted, or out of scope with its reason.
Result<Validation> validate_published(const std::filesystem::path& data, const std::filesystem::path& catalogue);

/// Per-row table, then one line per table, then the files that could not be read; errors in percent.
std::string render(const Validation&, bool with_rows = true);
/// hotbunk.validate/1: {"schema", "tables": [{name, quantity, rows, mean_abs_error, max_abs_error, bias, …}],
/// "ignored_files", "unreadable": [{code, file, line, message}]}.
std::string to_json(const Validation&);

}  // namespace hotbunk
