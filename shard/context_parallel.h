// Context parallelism: attention of sequences that W ranks share by chunks. Of the 2 W equal chunks of each, rank r has
// the r-th and the r-th from the end ("zigzag", layout/sequence.h): all of causal attention's work is then shared
// evenly. Everything but attention has a rank's own tokens alone, in the order of their positions.
//
//   kv        [1,T,2kd]   the rank's own keys and values: what goes to the others
//   ring                  in step i attention of the rank's queries and the keys and values of the rank i places before
//                         it, while these go on to the next rank. What the steps found is merged by its log-sum-exps,
//                         in fp32; backward sends the gradients of keys and values, in fp32, one step behind them,
//                         until they are home
//   gathered  [W,T,2kd]   all of them, by all-gather before attention; backward reduce-scatters their gradients
//
// Backward asks for keys and values again; nothing of others is kept.
#pragma once
#include "shard/tensor_parallel.h"

namespace hotbunk {

/// Attention of this rank's tokens: writes `attended` [T,ad] and returns the log-sum-exps [T,a] over all keys.
/// `cu_seqlens` counts the rank's tokens of each sequence.
Tensor context_attention(Emitter&, const TensorSharding&, const ForwardOp&, const Tensor& qkv, const Tensor& cu_seqlens,
                         const Tensor& attended);

/// What context_attention() read and made, and the gradients of one and the other.
struct AttendedBackward {
  Tensor d_attended, qkv, attended, lse, d_qkv;
};
void context_attention_backward(Emitter&, const TensorSharding&, const ForwardOp&, const Tensor& cu_seqlens,
                                const AttendedBackward&);

}  // namespace hotbunk
