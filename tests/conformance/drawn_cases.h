// Every op that computes or moves, at shapes and with numbers that a seed draws: to be computed by two backends.
#pragma once
#include "graph/tensor.h"
#include "tests/conformance/op_cases.h"

namespace hotbunk::conformance {

struct DrawnCases {
  std::vector<OpCase> cases;  // operands' names are unique over all of them
  Sizes sizes;
};

/// Activations in this dtype; gradients of weights too under even seeds, else fp32.
DrawnCases drawn_cases(std::uint64_t seed, DType activations);
/// Of engines whose ranks hold every sequence's keys in parts, for a plan of so many ranks.
DrawnCases held_cases(std::uint64_t seed, DType activations, int ranks);

}  // namespace hotbunk::conformance
