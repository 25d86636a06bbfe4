// What makes a scenario fit that does not: changes that were tried.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// The fastest of the nearest layouts that fit: one change of one key, else, of what is only priced, two. Each was
/// priced, or lowered where the scenario is, and its framework has it. nullopt: the point fits, or none of them does.
std::optional<Lever> remedy_of(const ScenarioPricer&, const RlPoint&);

/// In words: "--set rollout.memory_fraction=0.62: 71.3 GiB of a device", or that `plan` searches further.
std::string remedy_text(const std::optional<Lever>&);
std::string remedy_text(const ScenarioPricer&, const RlPoint&);
/// The same of a scenario's own layout.
std::string remedy_text(const Scenario&, const std::filesystem::path& catalogue);

}  // namespace hotbunk
