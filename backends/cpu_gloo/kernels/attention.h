// Causal self-attention of packed variable-length sequences, in tiles: nothing of size T×T is stored.
#pragma once
#include <span>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

/// o[t, head] = Σ_s softmax_s(score of q[t]·k[s]) v[s] over the s ≤ t of t's sequence that it sees; query head i reads
/// kv head i / (a/k). qkv: [T, (a+2k)·d] with T = cu_seqlens.back() (heads.h: with values of another width); o: [T,
/// a·d], of values' width; lse: fp32 [T, a], log Σ exp(score). cu_seqlens: S+1 non-decreasing offsets from 0; empty
/// sequences are allowed. Result bits do not depend on the number of threads nor on the other sequences. Products are
/// fp32, or bf16 on AMX (attention_amx.h) where scores are scaled alone.
void attention_forward(KernelContext&, ConstMatrix qkv, HeadShape, std::span<const std::int32_t> cu_seqlens, Scores,
                       Matrix o, float* lse);

/// dqkv[T, (a+2k)·d], overwritten whole, from d_o[T, a·d] and what forward saved (o, lse). dqkv must not overlap qkv.
void attention_backward(KernelContext&, ConstMatrix qkv, ConstMatrix o, ConstMatrix d_o, const float* lse, HeadShape,
                        std::span<const std::int32_t> cu_seqlens, Scores, Matrix dqkv);

}  // namespace hotbunk::kernels
