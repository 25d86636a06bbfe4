// Every op that computes or moves, at a small size: operands by name, and what its outputs must be where that is exact.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/op.h"

namespace hotbunk::conformance {

struct Operand {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  /// Element i before the op runs. None: an output that the op must write wholly; it starts as NaN, or as an integer
  /// that no op makes.
  std::function<double(std::int64_t i)> value;
};

/// Values of operands by index, before the op.
using Values = std::vector<std::vector<double>>;

struct OpCase {
  OpKind kind;
  std::vector<Operand> operands;
  std::vector<std::size_t> inputs, outputs;  // of the operands
  std::vector<std::pair<Attr, AttrValue>> attrs;
  /// Element i of the first output, exact before it is rounded to the output's dtype; none where it is not.
  std::function<double(const Values&, std::int64_t i)> first_output{};
  std::vector<Move> moves{};
  /// All elements of each of the other outputs, in order; none where they are not exact.
  std::vector<std::vector<double>> other_outputs{};
};

/// x as a tensor of that dtype holds it, fp32 or bf16.
double stored(DType, double x);

/// Of a linear that reads its matrix prepacked: that operand, which is to be prepacked where the op is, before it. What
/// lies in it then is the device's affair; what the product comes to is not.
std::optional<std::size_t> prepacked_operand(const OpCase&);

/// Activations in this dtype. T = 5 tokens in two sequences of 3 and 2: Sizes{5, 2, 9}.
std::vector<OpCase> op_cases(DType activations);

}  // namespace hotbunk::conformance
