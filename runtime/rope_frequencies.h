// The frequencies of an op's rotary embedding, from its attributes.
#pragma once
#include <vector>

#include "graph/op.h"

namespace hotbunk {

/// fp32[head_dim / 2] of a rope or rope_backward.
std::vector<float> rope_frequencies(const Op&);

}  // namespace hotbunk
