// Experts over data ranks: a rank's tokens send a row for each choice to the rank that has the expert, whose products
// come back the same way. Between the two a rank has the rows that have come to it, of which there may be none, or all.
//
//   choices   [T,c,H]   of the rank's own tokens, sorted by expert
//   routed    [R,H]     that have come: of the first rank by expert, then of the next one; R is counted on the device
//
// Where the tensor-parallel places have whole experts, a rank sends the rows of those that its place has, of all
// tokens, to the ranks of its own place.
//
// Where copies travel (train.expert_dispatch: per-rank), a token goes once to each rank that has some of its experts,
// and is spread over these there; its gradients are summed there, and the sum goes back. What experts leave comes back
// row by row all the same, so that a token's sum is in the order of its choices, whoever has their experts: the bits
// are those of one rank.
//
//   x [T,H] ── gather ──► copies [S,H] ── all-to-all ──► [U,H] ── gather ──► routed [R,H]
//   dx [T,H] ◄── sum ── [S,H] ◄── all-to-all ── [U,H] ◄── sum ── d_routed [R,H]
//
// Who sends how many, all ranks know: each says where its experts' rows begin, in one all-gather for each layer.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "shard/rules.h"

namespace hotbunk {

/// Beside the rows of choices: what all ranks send [W,E+1]. Beside the offsets of what came: how many rows it is.
ValueId sent_by_all(const Forward&, const ForwardOp& sort);
ValueId count_of_rows(const Forward&, const ForwardOp& sort);
/// Behind all values, where copies of tokens travel: which token each copy is of, and which copies each token has;
/// where each rank's begin as all ranks say it [W,W+1]; how many go and come; of each row that comes the copy that it
/// is of, and of each copy its rows (copy_sort, copy_arrivals).
struct CopyIds {
  ValueId tokens, copies, blocks, sent, came, sources, rows;
  std::vector<ValueId> all() const { return {tokens, copies, blocks, sent, came, sources, rows}; }
};
inline constexpr std::size_t num_copy_ids = 7;
CopyIds copy_ids(const Forward&);
/// The op of a layer that sorts its choices; none in a piece without experts.
const ForwardOp* sort_of(const Forward&);

/// With its count among the op's inputs, where rows that came are among its tensors.
Op& with_count_of_rows(Op&, const Forward&, const TensorSharding&, const Values&);

/// Says which experts' rows an expert_sort sorts on a rank: those of its place in the tensor-parallel group, of which
/// `expert_columns()` neighbours have the same.
Op& with_own_experts(Op& sort, const TensorSharding&);

/// An expert_sort's op, and what all ranks' come to on this one: sets its results and what is beside them.
void sort_of_all_ranks(Emitter&, const Forward&, const TensorSharding&, const ForwardOp&, const Tensor& choices,
                       Values&);

/// `choices` as they arrive at the ranks of their experts, all of them or those of a round, and back.
Tensor to_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& choices,
                  const Values&, std::int64_t round = 0);
void from_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& routed,
                  const Tensor& choices, const Values&, std::int64_t round = 0);
/// Where copies travel: tokens' rows x [T,H] as rows of this rank's experts, and the gradient of these as summands of
/// `d_x`, which they begin or are added to.
Tensor copies_to_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& x,
                         const Values&);
void copies_from_experts(Emitter&, const Forward&, const TensorSharding&, const std::string& name, const Tensor& routed,
                         const Tensor& d_x, bool first, const Values&);
/// Rows that come to this rank, or their gradients.
Tensor make_routed(Emitter&, const TensorSharding&, const std::string& name, DType, const Dim& width,
                   std::int64_t round = 0);

}  // namespace hotbunk
