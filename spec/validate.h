// What a scenario must satisfy as a whole: ranks, divisibility, exclusive options, lengths. Each diagnostic carries the
// arithmetic and the remedy. What merely cannot be *executed* yet is no error: planning and simulation take it.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Where a key, or the nearest map around it, stands in the user's files.
using ScenarioLocator = std::function<SourceLocation(std::string_view path)>;

/// Logits are divided by the temperature in fp32: below this, or 0 for greedy, nothing is left of them.
inline constexpr double least_temperature = 1e-6;

/// All violations, in the order of the keys. Source of the rules: BACKGROUND's tables, cited at each check.
Diagnostics validate(const Scenario&, const ScenarioLocator&);

/// Why this scenario cannot be run by today's backends, one reason per entry; empty: it can.
std::vector<std::string> unsupported_to_execute(const Scenario&);

}  // namespace hotbunk
