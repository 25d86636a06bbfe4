// A layer's mixture of experts in the place of its MLP: Mixtral, Qwen3-MoE, DeepSeek-V2 and V3, GLM-4.5, gpt-oss.
#pragma once
#include "model/forward.h"

namespace hotbunk {

/// From the normed stream to what goes back into it: router, the chosen experts' gated MLPs, their weighted sum, and
/// what the experts make that every token takes, where there are some. How many experts there are, how many a token
/// takes and how it chooses and weighs them, the model says (MoeSpec). Source: transformers, MixtralSparseMoeBlock,
/// Qwen3MoeSparseMoeBlock, DeepseekV2Moe, DeepseekV3MoE, Glm4MoeMoE and GptOssMLP.
ValueId expert_mlp(Forward&, const ModelSpec&, ValueId normed);

}  // namespace hotbunk
