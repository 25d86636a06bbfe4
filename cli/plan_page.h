// The answer of plan and of explain as one offline page.
#pragma once
#include <string>
#include <vector>

#include "planner/answers/choices.h"

namespace hotbunk {

/// Layouts and their seconds against memory, memory by moment, where the seconds go, what one number changes, findings.
/// `not_lowered`: why nothing executes the scenario. E103.
Status write_plan_page(const std::string& file, const ScenarioPricer&, const Explanation&, const Choices&,
                       const std::vector<std::string>& not_lowered);

}  // namespace hotbunk
