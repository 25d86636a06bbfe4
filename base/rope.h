// Frequencies of rotary position embeddings, as Hugging Face transformers forms them.
#pragma once
#include <cstdint>
#include <optional>
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

/// inv_freq[d/2], θ^(−2j/d) (then scaled), fp32 as transformers keeps it. d is even.
std::vector<float> rope_inv_freq(std::int64_t head_dim, double theta,
                                 const std::optional<Llama3RopeScaling>& scaling = std::nullopt);

}  // namespace hotbunk
