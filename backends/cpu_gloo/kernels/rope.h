// Rotary position embedding in Hugging Face's rotate-half convention: dimension j of a head pairs with j + d/2.
#pragma once
#include <optional>
#include <vector>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

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

enum class RopeDirection : bool { forward, backward };

/// Rotates the q and k heads of qkv[T, (a+2k)·d] in place by positions[t]·inv_freq; `backward` rotates the other way,
/// which is the gradient. positions: [T], ≥ 0. inv_freq: [d/2].
void rope(KernelContext&, Matrix qkv, const std::int32_t* positions, const float* inv_freq, std::int64_t T, HeadShape,
          RopeDirection);

}  // namespace hotbunk::kernels
