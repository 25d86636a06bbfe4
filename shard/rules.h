// The rules of a forward's ops: how each is written on one rank, what its backward is, and what that reads. Collectives
// come from them alone, where an op finds its input otherwise than it computes on (tensor_parallel.h).
#pragma once
#include <cstdint>
#include <vector>

#include "model/forward.h"
#include "shard/emitter.h"
#include "shard/tensor_parallel.h"
#include "spec/recompute_modules.h"
#include "spec/scenario.h"

namespace hotbunk {

/// This rank's tensors of a forward, by ValueId; without a buffer: not there. Behind them, in the same order, what
/// attention computes on where that is another tensor (ulysses.h), and what all ranks say of their choices
/// (expert_parallel.h), and behind these what is known of copies of tokens (copy_ids).
using Values = std::vector<Tensor>;
inline bool is_there(const Values& values, ValueId id) { return values[static_cast<std::size_t>(id)].buffer >= 0; }

/// Writes the ops of a forward that make what `values` lacks. With `only` those that make any of these, from what is
/// there: what a backward needs and was not kept.
void emit_forward(const Forward&, const TensorSharding&, Emitter&, Values& values,
                  const std::vector<ValueId>* only = nullptr);

/// What the backward reads of a forward, in the order of its ops.
std::vector<ValueId> read_by_backward(const Forward&, const TensorSharding&);

/// What of it is kept between the two, given what is recomputed:
///   none       all that backward reads
///   selective  not what these modules make
///   full       `entry`, from which all else can be computed
std::vector<ValueId> kept_values(const Forward&, const TensorSharding&, Recompute, RecomputeModules, ValueId entry);

/// Writes the backward. `gradients` by ValueId: of the results when it begins, of the inputs when it ends. A norm adds
/// to the gradient of the residual stream in place where there is one, so that its tensors may be the same before and
/// behind. Gradients of parameters are added to what is there with `accumulate`; an embedding's always are. What
/// backward reads and `values` lacks is an internal fault.
void emit_backward(const Forward&, const TensorSharding&, BackwardEmitter&, const Values& values, Values& gradients,
                   bool accumulate);

}  // namespace hotbunk
