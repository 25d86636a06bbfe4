// Samples for the report: of a run's samples.jsonl the first step's and the last step's best and worst.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// The lines of those samples, in order; by reward, without rewards the first of each step. None where there is no such
/// file. E111 a line that is no JSON, E112 one without step or tokens.
Result<std::vector<nlohmann::ordered_json>> read_shown_samples(const std::filesystem::path&);

}  // namespace hotbunk
