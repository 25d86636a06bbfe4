// Group-normalised advantages (GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace hotbunk {

/// One advantage per sample; samples of one prompt (a group) are consecutive.
///   A_i = (r_i - mean) / (std + 1e-6)      with the group's sample standard deviation (n - 1), as verl and TRL do
///   A_i = r_i - mean                       without normalize_std ("Dr. GRPO"), or when a group has one sample
/// rewards.size() must be a multiple of group_size.
std::vector<float> group_advantages(std::span<const double> rewards, std::int64_t group_size, bool normalize_std);

}  // namespace hotbunk
