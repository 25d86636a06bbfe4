// Files with a JSON document on each line.
#pragma once
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/json.h"
#include "tests/run/program.h"

namespace hotbunk {

inline std::vector<nlohmann::json> lines_of(const fs::path& file) {
  std::vector<nlohmann::json> out;
  std::istringstream text(text_of(file));
  for (std::string line; std::getline(text, line);) out.push_back(json_from<nlohmann::json>(line));
  return out;
}

}  // namespace hotbunk
