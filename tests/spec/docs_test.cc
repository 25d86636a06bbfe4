// docs/testing.md says which test holds what: by names of tests that are there.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cctype>
#include <filesystem>
#include <string>
#include <vector>

#include "base/file.h"
#include "tests/paths.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

/// The string literals from `at` on, one behind the other: what a name that is broken over lines says.
std::string literals_at(const std::string& source, std::size_t at) {
  std::string out;
  for (;; ++at) {
    while (at < source.size() && std::isspace(static_cast<unsigned char>(source[at]))) ++at;
    if (at >= source.size() || source[at] != '"') return out;
    for (++at; at < source.size() && source[at] != '"'; ++at) out += source[at] == '\\' ? source[++at] : source[at];
  }
}

std::vector<std::string> names_of_tests() {
  const std::string call = "TEST_CASE(";
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(source_folder) / "tests")) {
    if (entry.path().extension() != ".cc") continue;
    const auto source = read_file(entry.path());
    REQUIRE(source);
    for (auto at = source->find(call); at != source->npos; at = source->find(call, at + 1))
      names.push_back(literals_at(*source, at + call.size()));
  }
  return names;
}

/// What stands between the stars of a table's line, outside of code.
std::vector<std::string> named_in(const std::string& line) {
  std::vector<std::string> out;
  std::string* open = nullptr;
  bool code = false;
  for (const char c : line) {
    if (c == '`') code = !code;
    else if (code) continue;
    else if (c == '*') open = open == nullptr ? &out.emplace_back() : nullptr;
    else if (open != nullptr) *open += c;
  }
  std::erase(out, "");  // ** of bold text
  return out;
}

}  // namespace

TEST_CASE("docs/testing.md names tests that are there") {
  const auto names = names_of_tests();
  CHECK(names.size() > 500);
  const auto page = read_file(fs::path(source_folder) / "docs/testing.md");
  REQUIRE(page);
  int named = 0;
  for (std::size_t at = 0; at < page->size();) {
    const std::size_t end = std::min(page->find('\n', at), page->size());
    const std::string line = page->substr(at, end - at);
    at = end + 1;
    if (!line.starts_with('|')) continue;
    for (std::string name : named_in(line)) {
      const std::string dots = "…";  // before or behind what is left out
      if (name.starts_with(dots)) name.erase(0, dots.size());
      if (name.ends_with(dots)) name.erase(name.size() - dots.size());
      ++named;
      INFO(name);
      CHECK(std::ranges::any_of(names, [&](const std::string& n) { return n.find(name) != n.npos; }));
    }
  }
  CHECK(named > 100);
}

}  // namespace hotbunk
