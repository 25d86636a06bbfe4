// The first lines of `plan`: verdict, seconds with their errors, the best layout of the same GPUs, what lint found, and
// the shorthand of layouts.
#pragma once
#include <string>
#include <vector>

#include "planner/answers/choices.h"
#include "planner/answers/lint.h"

namespace hotbunk {

/// Ten lines at most, of no more than `headline_columns` columns but for flags to copy. `colour`: ANSI colours.
std::string headline(const ScenarioPricer&, const Choices&, const std::vector<Finding>&, bool colour);
inline constexpr std::size_t headline_columns = 160;

/// "dp data parallel, tp tensor parallel, …": of the abbreviations that stand in a described layout.
std::string shorthand_of(const std::string& described);

/// Lint's errors and warnings about the scenario's own layout where it is ranked and not explained: what `lint_beside`
/// says without trying remedies.
std::vector<Finding> lint_beside(const ScenarioPricer&, const Choices&);

}  // namespace hotbunk
