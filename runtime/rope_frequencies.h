// The frequencies of an op's rotary embedding, from its attributes.
#pragma once
#include <vector>

#include "graph/op.h"

namespace hotbunk {

/// fp32[d / 2], d being head_dim, or rope_first or rope_dim where only so much of a head turns, of a rope or
/// rope_backward, from rope_theta and
///   rope_factor, rope_low, rope_high, rope_original   what config.json says of the type "llama3"
///   rope_factor, rope_ramp_begin, rope_ramp_end       pairs between which frequencies begin to be divided, and are
/// Cosines and sines are times rope_amplitude.
std::vector<float> rope_frequencies(const Op&);

}  // namespace hotbunk
