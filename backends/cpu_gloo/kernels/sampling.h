// The next token of every running sequence.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// fp32 logits [S, V] held as blocks [num_blocks][S][V/num_blocks] (what an all-gather over tensor-parallel ranks
/// gives; 1 block = plain rows). Columns ≥ vocab are padding and never chosen.
struct LogitBlocks {
  const float* data = nullptr;
  std::int64_t num_blocks = 1;
  std::int64_t block_width = 0;  // V / num_blocks
  std::int64_t vocab = 0;        // ≤ V
};

struct SamplingParams {
  float temperature = 1.0f;  // 0 = greedy: the largest logit, lowest index among equals
  std::int32_t top_k = 0;    // keep the k largest; 0 = all
  float top_p = 1.0f;        // then keep the smallest set of the most probable with mass ≥ top_p; 1 = all
};

/// tokens[s] by inverse transform of uniforms[s] ∈ [0,1): in index order without truncation, in descending order of
/// probability (lowest index first among equals) with it. logp[s] is the token's log-prob under the
/// *temperature-scaled, untruncated* distribution, which is what training recomputes; greedy reports it at
/// temperature 1. Batch-invariant: a row depends on its own logits and uniform only, not on num_blocks either.
void sample_tokens(KernelContext&, LogitBlocks, const SamplingParams&, const float* uniforms, std::int32_t* tokens,
                   float* logp, std::int64_t S);

}  // namespace hotbunk::kernels
