// Frequencies of rotary position embeddings, as Hugging Face transformers forms them.
#pragma once
#include <cstdint>
#include <variant>
#include <vector>

namespace hotbunk {

/// rope_scaling of type "llama3" in config.json: long wavelengths are divided by `factor`, short ones kept, those
/// between interpolated.
struct Llama3RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position = 8192;
};

/// rope_scaling of type "linear" and "yarn": pairs up to `begin` keep their frequency, those from `end` on are divided
/// by `factor`, those between interpolated. Linear divides all.
/// Source: Peng et al., YaRN (2023); transformers, _compute_yarn_parameters.
struct RampRopeScaling {
  double factor = 1.0;
  double begin = -1.0, end = 0.0;  // pairs
};
/// The ramp's ends of yarn: where `fast` and `slow` rotations fit into the original positions. `whole`: rounded to
/// whole pairs, away from each other.
RampRopeScaling yarn_rope_scaling(std::int64_t head_dim, double theta, double factor, double original_max_position,
                                  double fast, double slow, bool whole);

using RopeScalingRule = std::variant<std::monostate, Llama3RopeScaling, RampRopeScaling>;

/// inv_freq[d/2], θ^(−2j/d) (then scaled), fp32 as transformers keeps it. d is even.
std::vector<float> rope_inv_freq(std::int64_t head_dim, double theta, const RopeScalingRule& = {});

}  // namespace hotbunk
