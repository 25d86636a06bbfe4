// Losses that routers add in training: that experts of a layer get equal shares of each sequence, and that logits stay
// small. They are functions of a router's logits and of what it chose, so their whole is of its backward: choices of
// each expert are counted, over all ranks that have tokens of the same sequences, and the gradient goes beside that of
// the weights. Sequences are the same in every layout, and with them the loss.
//
//   experts [T,c] ── counts ──► [S,E] ── all-reduce over who shares sequences ──► [S,E]
//   d_logits [T,E] ── router_loss: += ──► d_logits                           └──► metrics
//
// Where a tensor-parallel group routes its tokens in blocks, each of its ranks gathers all logits and choices, finds
// its part of the whole group's gradient, and gets back what is of its block's tokens.
#pragma once
#include <string>

#include "shard/emitter.h"
#include "shard/tensor_parallel.h"

namespace hotbunk {

/// Adds to `d_logits` [T,E] the gradient by `logits` of what the router adds to the loss, and that to the metrics.
void add_router_loss(BackwardEmitter&, const TensorSharding&, const std::string& name, const RouterLossFeeds&,
                     const Tensor& logits, const Tensor& experts, const Tensor& d_logits);

}  // namespace hotbunk
