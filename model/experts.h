// A layer's mixture of experts in the place of its MLP: Mixtral, Qwen3-MoE.
#pragma once
#include "model/forward.h"

namespace hotbunk {

/// From the normed stream to what goes back into it: router, the chosen experts' gated MLPs, their weighted sum. How
/// many experts there are, how many a token takes and what their weights are a softmax over, the model says (MoeSpec).
/// Source: transformers, MixtralSparseMoeBlock and Qwen3MoeSparseMoeBlock.
ValueId expert_mlp(Forward&, ValueId normed);

}  // namespace hotbunk
