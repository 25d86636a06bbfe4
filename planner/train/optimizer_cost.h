// What an optimizer keeps beside the master copy, and what its step takes. Nothing but AdamW is executed.
//
//   adamw       two moments in train.precision.moments
//   adamw-8bit  two moments of 1 byte, and a 4-byte scale per block of 256 (torchao, bitsandbytes)
//   adamw-4bit  two of half a byte, blocks of 128 (torchao)
//   sgd         a momentum, or nothing
//   adafactor   a row and a column of fp32 per matrix, a vector per vector (Shazeer and Stern, 1804.04235)
//   muon        a momentum of the matrices inside layers, which it orthogonalizes; AdamW for everything else
//               (Jordan et al. 2024; Moonlight, 2502.16982)
#pragma once
#include <algorithm>

#include "planner/train/train_model.h"

namespace hotbunk {

/// The state is not so many bytes per element, but depends on which parameters are matrices and on their sides.
constexpr bool follows_shapes(OptimizerName n) { return n == OptimizerName::adafactor || n == OptimizerName::muon; }

/// Bytes per element beside the master copy; of Muon and Adafactor those of a matrix in a layer, without its sides.
/// `adam`: of AdamW's two moments. Parameters too small for a block keep fp32 moments; that is left out.
/// Source of the blocks: torchao, torchao/optim/README.md (256 for 8-bit, 128 for 4-bit states).
constexpr double moment_bytes_each(OptimizerName n, double adam, bool momentum) {
  switch (n) {
    case OptimizerName::adamw:
      return adam;
    case OptimizerName::adamw_8bit:
      return 2.0 * (1.0 + 4.0 / 256.0);
    case OptimizerName::adamw_4bit:
      return 2.0 * (0.5 + 4.0 / 128.0);
    case OptimizerName::sgd:
    case OptimizerName::adafactor:
      return momentum ? adam / 2.0 : 0.0;
    case OptimizerName::muon:
      return adam / 2.0;
  }
  return adam;
}

/// Bytes of an element on its way to the rank that orthogonalizes its matrix, and of the update on its way back: bf16.
inline constexpr double orthogonalizer_bytes = 2.0;

/// Elements of matrices that a rank sends to their owners. FSDP and ZeRO-3 cut every matrix, so that its shards meet on
/// one rank of the shard group; ZeRO-1 and 2 give whole matrices to ranks (Megatron's layer-wise optimizer).
inline double own_matrices(const TrainPoint& p, const OptimizerWork& w) {
  if (p.sharding != Sharding::fsdp && p.sharding != Sharding::zero3) return 0.0;
  return p.shard_ranks() > 1 ? p.own_elements(w.ordinary_matrices, w.expert_matrices) : 0.0;
}

}  // namespace hotbunk
