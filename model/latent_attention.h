// Multi-head latent attention in the place of q_proj … attention: DeepSeek-V2 and V3.
#pragma once
#include "model/forward.h"

namespace hotbunk {

/// From the normed stream to what all heads attended. Queries come from a latent of their own (q_lora_rank), or
/// straight from the stream; keys and values of all heads from another, which together with one rotated part of a key
/// for all heads is what is worth keeping of a token. Norms of latents have an eps of their own. Source: transformers,
/// DeepseekV2Attention and DeepseekV3Attention.
ValueId latent_attention(Forward&, const ModelSpec&, ValueId normed);

}  // namespace hotbunk
