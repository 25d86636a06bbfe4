// What goes wrong with a scenario on a cluster before anything is booked: rules, each from failures that people had.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// error:   it fails, or cannot be launched; warning: it may fail, or loses time; note: it is not as it seems.
enum class LintLevel : std::uint8_t { note, warning, error };
std::string_view name_of(LintLevel);

struct LintRule {
  const char* code;    // "L01"
  const char* title;   // what is looked for
  const char* source;  // where it failed
};
/// In the order of their codes; docs/lint.md lists them.
std::span<const LintRule> lint_rules();

struct Finding {
  std::string code;  // of its rule
  LintLevel level = LintLevel::warning;
  std::string what;  // with the arithmetic
  std::string help;  // "" or what to do; where it is a --set, it was tried
};
/// Errors first, then by code.
std::vector<Finding> lint(const ScenarioPricer&);
/// Of a scenario that was explained already.
std::vector<Finding> lint(const ScenarioPricer&, const Explanation&);

/// What a launch of another system says and a scenario does not. "": it does not say so.
struct LaunchHabits {
  std::string expandable;  // PyTorch's allocator has expandable segments
};
/// Their rule, L15.
std::vector<Finding> lint_launch(const ScenarioPricer&, const LaunchHabits&);

/// What stands beside another answer: no notes, and not whether it fits, which that answer says itself.
std::vector<Finding> lint_beside(const ScenarioPricer&, const Explanation&);

std::string render(const std::vector<Finding>&);
/// A line each: "note: L07 warning: …; help".
std::string render_beside(const std::vector<Finding>&);
std::string to_json(const std::string& scenario, const std::vector<Finding>&);

}  // namespace hotbunk
