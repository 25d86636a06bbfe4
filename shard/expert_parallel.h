// Experts over data ranks: a rank's tokens send a row for each choice to the rank that has the expert, whose products
// come back the same way. Between the two a rank has the rows that have come to it, of which there may be none, or all.
//
//   choices   [T,c,H]   of the rank's own tokens, sorted by expert
//   routed    [R,H]     that have come: of the first rank by expert, then of the next one; R is counted on the device
//
// Where the tensor-parallel places have whole experts, a rank sends the rows of those that its place has, of all
// tokens, to the ranks of its own place.
//
// Who sends how many, all ranks know: each says where its experts' rows begin, in one all-gather for each layer.
#pragma once
#include <string>
#include <vector>

#include "shard/rules.h"

namespace hotbunk {

/// Beside the rows of choices: what all ranks send [W,E+1]. Beside the offsets of what came: how many rows it is.
ValueId sent_by_all(const Forward&, const ForwardOp& sort);
ValueId count_of_rows(const Forward&, const ForwardOp& sort);
/// The op of a layer that sorts its choices; none in a piece without experts.
const ForwardOp* sort_of(const Forward&);

/// With its count among the op's inputs, where rows that came are among its tensors.
Op& with_count_of_rows(Op&, const Forward&, const TensorSharding&, const Values&);

/// An expert_sort's op, and what all ranks' come to on this one: sets its results and what is beside them.
void sort_of_all_ranks(Emitter&, const Forward&, const TensorSharding&, const ForwardOp&, const Tensor& choices,
                       Values&);

/// `choices` as they arrive at the ranks of their experts, all of them or those of a round, and back.
Tensor to_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& choices,
                  const Values&, std::int64_t round = 0);
void from_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& routed,
                  const Tensor& choices, const Values&, std::int64_t round = 0);
/// Rows that come to this rank, or their gradients.
Tensor make_routed(Emitter&, const TensorSharding&, const std::string& name, DType, const Dim& width,
                   std::int64_t round = 0);

}  // namespace hotbunk
