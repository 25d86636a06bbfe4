// What `explain` turns one step at a time: the layouts around a scenario's own.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "planner/answers.h"

namespace hotbunk {

/// Layouts that differ by one step in one knob, each with what changes. The loader takes all of them.
std::vector<std::pair<std::string, RlPoint>> neighbours(const ScenarioPricer&, const RlPoint&);

}  // namespace hotbunk
