// Ops that are one launch together: the AdamW steps of a rank's shards, and the sums of squares of its gradients. A
// step has one op for each of a model's layers; by itself each would be a short kernel, and a launch takes about as
// long.
//
// Numbers do not depend on what was launched together, to the bit (kernels/optimizer.cu).
#pragma once
#include <span>

#include "backends/cuda/op_launches.h"

namespace hotbunk::cuda {

/// Kinds of which several ops may be one launch.
bool is_joined(OpKind);

/// Whether `next` may be launched with `ops`, which are one launch so far: the same kind with the same numbers, room
/// for it, and none of them writes what another touches. All on the device, of one stream, with nothing between them.
bool joins(std::span<const OpCall> ops, const OpCall& next);

/// One launch (of a step), or two (sums, then their sum).
void launch_steps(std::span<const OpCall>, const Launcher&);
void launch_sums(std::span<const OpCall>, const Launcher&, CUdeviceptr scratch);
void launch_together(std::span<const OpCall>, const Launcher&, CUdeviceptr scratch);

/// What launch_sums needs: a partial sum of each block of each tensor.
std::int64_t sums_scratch_bytes();

}  // namespace hotbunk::cuda
