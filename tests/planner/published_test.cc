// Tables of anyone's: whatever their cells hold, every row is predicted or out of scope with its reason.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "planner/validate.h"
#include "planner/validate_tables.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;
using Cells = std::vector<std::vector<std::string>>;  // first the header
const fs::path published = fs::path(HOTBUNK_SOURCE_DIR) / "data" / "published";

Cells read_cells(const fs::path& file, std::size_t most_rows = 1'000'000) {
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
  Result<Validation> validate(const std::string& name, const Cells& cells) const {
    std::string text;
    for (const auto& row : cells) text += fmt::format("{}\n", fmt::join(row, ","));
    return validate_text(name, text);
  }
  Result<Validation> validate_text(const std::string& name, const std::string& text) const {
    for (const auto& old : fs::directory_iterator(path_)) fs::remove(old.path());
    std::ofstream(path_ / (name + ".csv")) << text;
    return validate_published(path_, catalog_root());
  }

 private:
  fs::path path_;
};

std::size_t column_of(const Cells& cells, const std::string& name) {
  const auto at = std::find(cells[0].begin(), cells[0].end(), name);
  REQUIRE(at != cells[0].end());
  return static_cast<std::size_t>(at - cells[0].begin());
}

/// What is wrong with an answer about `rows` rows; "" when nothing is.
std::string fault_of(const std::string& name, const Result<Validation>& v, std::size_t rows) {
  if (!v) {
    for (const Diagnostic& d : v.error())
      if (d.code != "E107" || d.where.file.empty() || d.where.line != 1 || d.help.empty()) return render(v.error());
    return "";
  }
  std::size_t sum = 0;
  for (const ValidationTable& t : v->tables) {
    sum += t.rows.size() + t.skipped.size();
    for (const PredictedRow& r : t.rows)
      if (!(r.measured > 0.0 && r.predicted > 0.0 && std::isfinite(r.error())))
        return fmt::format("{}: {} measured {} predicted {}", t.name, r.label, r.measured, r.predicted);
    for (const SkippedRow& r : t.skipped)
      if (r.why.empty()) return fmt::format("{}: {} without a reason", t.name, r.label);
    // A row of Korthikanti's file is of one quantity; elsewhere every quantity has every row.
    if (name != "korthikanti_a100" && t.rows.size() + t.skipped.size() != rows)
      return fmt::format("{}: {} rows and {} out of scope of {}", t.name, t.rows.size(), t.skipped.size(), rows);
    if (t.rows.empty() != nlohmann::json::parse(to_json({{t}}))["tables"][0]["mean_abs_error"].is_null())
      return t.name + ": an error of no rows";
  }
  if (name == "korthikanti_a100" && sum != rows) return fmt::format("{} of {} rows", sum, rows);
  return "";
}

}  // namespace

TEST_CASE("whatever a column of a published table holds, no row is lost, and nothing crashes") {
  const Folder folder;
  std::size_t runs = 0;
  for (const auto& file : fs::directory_iterator(published)) {
    if (file.path().extension() != ".csv") continue;
    const std::string name = file.path().stem();
    const Cells whole = read_cells(file.path(), 8);
    REQUIRE(whole.size() > 1);
    for (std::size_t column = 0; column < whole[0].size(); ++column) {
      Cells without = whole;
      for (auto& row : without) row.erase(row.begin() + static_cast<std::ptrdiff_t>(column));
      INFO(name << ", column " << whole[0][column]);
      CHECK(fault_of(name, folder.validate(name, without), whole.size() - 1) == "");
      for (const char* cell : {"", "0", "-1", "n/a", "1e30", "1e-30", "0.5", "7", "nan", "inf", "1048576"}) {
        Cells changed = whole;
        for (std::size_t i = 1; i < changed.size(); ++i) changed[i][column] = cell;
        INFO("cell '" << cell << "'");
        CHECK(fault_of(name, folder.validate(name, changed), whole.size() - 1) == "");
        // One row's bad cell is that row's alone.
        changed = whole;
        changed[1][column] = cell;
        CHECK(fault_of(name, folder.validate(name, changed), whole.size() - 1) == "");
        runs += 2;
      }
    }
  }
  CHECK(runs > 2000);
}

TEST_CASE("a table without a column, a header or rows says so") {
  const Folder folder;
  Cells cells = read_cells(published / "vtrain_a100_single_node.csv", 3);
  cells[0][column_of(cells, "hidden size")] = "hiden size";
  const auto misspelt = folder.validate("vtrain_a100_single_node", cells);
  REQUIRE_FALSE(misspelt.has_value());
  CHECK_THAT(misspelt.error()[0].message, Catch::Contains("'hidden size'"));
  CHECK_THAT(misspelt.error()[0].help, Catch::Contains("rename 'hiden size'"));
  CHECK(misspelt.error()[0].where.line == 1);

  const auto nothing = folder.validate_text("torchtitan", "\n\n");
  REQUIRE_FALSE(nothing.has_value());
  CHECK(nothing.error()[0].code == "E107");

  cells = read_cells(published / "korthikanti_a100.csv", 0);
  const auto header = folder.validate("korthikanti_a100", cells);
  REQUIRE(header.has_value());
  CHECK_THAT(render(*header), Catch::Contains("the file has no such row"));
  CHECK_THAT(render(*header), !Catch::Contains("0.00 %"));
  for (const auto& t : nlohmann::json::parse(to_json(*header))["tables"]) {
    CHECK(t["rows"] == 0);
    CHECK(t["bias"].is_null());
  }

  // A folder without a table of a known name is no folder of tables, whatever else lies there.
  const auto unknown = folder.validate("korthikanti", cells);
  REQUIRE_FALSE(unknown.has_value());
  CHECK_THAT(unknown.error()[0].message, Catch::Contains("no published table"));
}

}  // namespace hotbunk
