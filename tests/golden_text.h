// Tests that are text files: what to do, a line `----`, and exactly what comes of it.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/file.h"

namespace hotbunk::test {

/// Hands what stands above the bar of each file of the folder to `run`, in the order of their names, and checks that
/// its answer is what stands below. HOTBUNK_UPDATE=1 writes the answer there instead: read the difference before you
/// commit it. Returns the answers by file name.
inline std::map<std::string, std::string> check_golden_texts(
    const std::filesystem::path& folder, const std::function<std::string(const std::string& input)>& run) {
  const std::string bar = "----\n";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::ranges::sort(files);
  std::map<std::string, std::string> answers;
  for (const auto& path : files) {
    INFO(path.filename().string());
    const auto text = read_file(path);
    REQUIRE(text);
    const auto at = text->find(bar);
    REQUIRE(at != std::string::npos);
    const std::string input = text->substr(0, at), found = run(input);
    if (std::getenv("HOTBUNK_UPDATE") != nullptr)
      REQUIRE(write_file_atomic(path, fmt::format("{}{}{}", input, bar, found)));
    else CHECK(found == text->substr(at + bar.size()));
    answers.emplace(path.filename().string(), found);
  }
  return answers;
}

}  // namespace hotbunk::test
