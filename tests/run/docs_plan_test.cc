// What docs/plan.md and docs/run.md show of the demo's plan, and docs/import.md of its script, is what the program
// says.
#include <catch2/catch.hpp>
#include <fstream>
#include <regex>
#include <sstream>

#include "tests/run/program.h"

using namespace hotbunk;

namespace {

/// With one space for each run of them, and none at the ends.
std::string spaced(const std::string& text) {
  std::string out;
  std::istringstream words(text);
  for (std::string w; words >> w;) out += (out.empty() ? "" : " ") + w;
  return out;
}

/// Whether a line of the program has the page's, whose "…" stand for anything.
bool shows(const std::string& said, const std::string& page) {
  const std::string dots = "…";
  std::size_t from = 0, at = 0;
  for (std::size_t begin = 0; begin <= page.size();) {
    const std::size_t end = std::min(page.find(dots, begin), page.size());
    const std::string piece = page.substr(begin, end - begin);
    at = said.find(piece, from);
    if (at == said.npos || (begin == 0 && at != 0)) return false;
    from = at + piece.size();
    if (end == page.size()) return page.ends_with(dots) || from == said.size();
    begin = end + dots.size();
  }
  return true;
}

/// Lines of the page's blocks of output that begin with this.
std::vector<std::string> shown_behind(const std::string& page, const std::string& first) {
  std::vector<std::string> out;
  bool inside = false, wanted = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) {
      inside = !inside, wanted = false;
      continue;
    }
    if (!inside) continue;
    if (line.starts_with(first)) wanted = true;
    if (wanted && spaced(line) != "…") out.push_back(spaced(line));
  }
  return out;
}

/// The sum of the numbers that the pattern's group has in all its matches.
std::int64_t sum_of(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  std::int64_t sum = 0;
  for (auto m = std::sregex_iterator(text.begin(), text.end(), expression); m != std::sregex_iterator(); ++m)
    sum += std::stoll((*m)[1]);
  return sum;
}

std::string grouped(std::int64_t n) {
  return n < 1000 ? std::to_string(n) : fmt::format("{},{:03}", n / 1000, n % 1000);
}

}  // namespace

TEST_CASE("what docs/plan.md shows of the demo's plan is what plan --print says of it") {
  const std::string page = text_of(fs::path(source_folder) / "docs/plan.md");
  const Result2 demo =
      hotbunk_command(fmt::format("plan {} --print", (fs::path(source_folder) / "scenarios/demo.yaml").string()));
  REQUIRE(demo.code == 0);
  std::vector<std::string> said;
  for (const std::string& line : lines_of(demo.out)) said.push_back(spaced(line));
  int shown = 0;
  for (const char* first : {"plan ", "  body train.reduce"})
    for (const std::string& line : shown_behind(page, first)) {
      INFO(line);
      CHECK(std::ranges::any_of(said, [&](const std::string& s) { return shows(s, line); }));
      ++shown;
    }
  CHECK(shown > 25);
  CHECK(text_of(fs::path(source_folder) / "docs/run.md").find("plan: saved " + said[0].substr(5) + ", now") !=
        std::string::npos);
}

TEST_CASE("docs/plan.md counts the bodies, calls and ops of the 7B as they are") {
  const std::string page = text_of(fs::path(source_folder) / "docs/plan.md");
  const Result2 plan = hotbunk_command(
      fmt::format("plan {} --print", (fs::path(source_folder) / "scenarios/qwen2.5-7b-fsdp8.yaml").string()));
  REQUIRE(plan.code == 0);
  std::string calls, written;  // lines of blocks, and of bodies
  for (const std::string& line : lines_of(plan.out)) {
    if (line.starts_with("    block ")) calls += line + '\n';
    if (line.starts_with("  body ")) written += line + '\n';
  }
  const std::string says =
      fmt::format("`qwen2.5-7b-fsdp8` is {} calls of {} bodies: {} ops written for {} that run",
                  grouped(sum_of(calls, "([0-9]+) calls?,")), sum_of(plan.out, "([0-9]+) bodies,"),
                  grouped(sum_of(written, "([0-9]+) ops?,")), grouped(sum_of(calls, "calls?, ([0-9]+) ops?")));
  INFO(says);
  CHECK(page.find(says) != page.npos);
}

TEST_CASE("what docs/import.md shows of its script is what import says of it") {
  const std::string page = text_of(fs::path(source_folder) / "docs/import.md");
  // The blocks are: commands, the script, the scenario, the answer.
  std::vector<std::string> blocks;
  bool inside = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) {
      if (inside = !inside; inside) blocks.emplace_back();
    } else if (inside) {
      blocks.back() += line + '\n';
    }
  }
  REQUIRE(blocks.size() > 3);
  const fs::path folder = fs::temp_directory_path() / ("hotbunk_docs_import_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream(folder / "run.sh") << blocks[1];
  const Result2 import = hotbunk_command(fmt::format("import verl {}", (folder / "run.sh").string()));
  fs::remove_all(folder);
  REQUIRE(import.code == 0);
  std::vector<std::string> said;
  for (const std::string& line : lines_of(import.out + import.err))
    said.push_back(spaced(std::regex_replace(line, std::regex(R"(\(/[^ ]*/run\.sh:)"), "(run.sh:")));
  for (const std::size_t block : {2U, 3U})
    for (const std::string& line : lines_of(blocks[block])) {
      if (line.empty()) continue;
      INFO(line);
      CHECK(std::ranges::any_of(said, [&](const std::string& s) { return shows(s, spaced(line)); }));
    }
}
