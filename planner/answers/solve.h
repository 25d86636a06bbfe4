// How far one key of a scenario can go.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// The largest value of a number's key with which the scenario fits, found by doubling or halving from its own and then
/// by halves; to a half per cent, whole numbers below 200 exactly. Between values that fit there may be others that do
/// not: what is found is an edge.
struct Solved {
  std::string key, unit;
  std::string value;   // "" where no value that was tried fits
  std::string beside;  // "key=value" of a key that follows it: tokens of a micro-batch of so many of the longest
  SweepRow at;         // of it
  std::string beyond;  // the next value tried above, "" at the key's end
  SweepRow why;        // of that: it does not fit, or is no scenario
  std::vector<std::string> tried;
};
/// E261 for a key that is no number, or a section; what sweep says of the scenario.
Result<Solved> solve(const std::filesystem::path& scenario, const std::vector<std::string>& overrides,
                     const std::string& key, const std::filesystem::path& catalogue);
std::string render(const Solved&);
std::string to_json(const Solved&);

}  // namespace hotbunk
