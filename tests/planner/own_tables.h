// Tables of one's own for `validate`: the published ones with other cells.
#pragma once
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "tests/paths.h"

namespace hotbunk {

namespace fs = std::filesystem;
using Cells = std::vector<std::vector<std::string>>;  // first the header
inline const fs::path published = fs::path(source_folder) / "data" / "published";

inline Cells read_cells(const fs::path& file, std::size_t most_rows = 1'000'000) {
  Cells out;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line) && out.size() <= most_rows;) {
    std::vector<std::string> cells(1);
    for (char c : line)
      if (c == ',') cells.emplace_back();
      else if (c != '\r') cells.back() += c;
    out.push_back(std::move(cells));
  }
  return out;
}

/// A folder with one table, gone at the end.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / fmt::format("hotbunk_validate_{}", ::getpid())) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  /// `beside`: a second file, of the same text where `other` says nothing.
  Result<Validation> validate(const std::string& name, const Cells& cells, const std::string& beside = "",
                              const std::string& other = "") const {
    std::string text;
    for (const auto& row : cells) text += fmt::format("{}\n", fmt::join(row, ","));
    return validate_text(name, text, beside, other);
  }
  Result<Validation> validate_text(const std::string& name, const std::string& text, const std::string& beside = "",
                                   const std::string& other = "") const {
    for (const auto& old : fs::directory_iterator(path_)) fs::remove(old.path());
    std::ofstream(path_ / (name + ".csv")) << text;
    if (!beside.empty()) std::ofstream(path_ / beside) << (other.empty() ? text : other);
    context_.trained.clear(), context_.iterations.clear();
    return validate_published(path_, context_);
  }

 private:
  fs::path path_;
  mutable ValidationContext context_{catalog_root()};  // what it has loaded serves the next table
};

inline std::size_t column_of(const Cells& cells, const std::string& name) {
  const auto at = std::find(cells[0].begin(), cells[0].end(), name);
  REQUIRE(at != cells[0].end());
  return static_cast<std::size_t>(at - cells[0].begin());
}

/// What becomes of the first row of a published table with the cells that `sets` names.
struct Fate {
  double predicted = 0.0;  // 0: out of scope
  std::string why;
};
inline Fate fate(const std::string& file, const std::map<std::string, std::string>& sets,
                 const std::string& table = "") {
  const Folder folder;
  Cells cells = read_cells(published / (file + ".csv"), 1);
  for (const auto& [column, value] : sets) cells[1][column_of(cells, column)] = value;
  const auto v = folder.validate(file, cells);
  if (!v) FAIL(render(v.error()));
  for (const ValidationTable& t : v->tables) {
    if (t.name != (table.empty() ? file : table)) continue;
    if (!t.skipped.empty()) return {0.0, t.skipped[0].why};
    REQUIRE(t.rows.size() == 1);
    return {t.rows[0].predicted, ""};
  }
  FAIL("no such table");
  return {};
}
inline double priced(const std::string& file, const std::map<std::string, std::string>& sets,
                     const std::string& table = "") {
  const Fate f = fate(file, sets, table);
  INFO(file << ": " << f.why);
  CHECK(f.predicted > 0.0);
  return f.predicted;
}

}  // namespace hotbunk
