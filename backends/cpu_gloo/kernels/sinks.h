// Attention sinks (gpt-oss): softmax over a query's keys counts one more score, of the head's own, whose value is zero.
//   lse' = log(exp(lse) + exp(sink))   o' = o exp(lse - lse')
// With o' and lse' in the place of o and lse, attention's backward is what it is without sinks: its weights
// exp(score - lse') are what they are beside a sink, and do·o' is the mean of dP under all weights, as the sink's is 0.
// Source: transformers, GptOssAttention (eager_attention_forward).
#pragma once
#include <cstdint>

#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// o[T, a·d] and lse[T, a] of attention, in place. sinks: [a], fp32 or bf16. A query without keys (lse -inf) stays
/// zero. A row's bits depend on nothing but that row.
void attention_sinks(KernelContext&, Matrix o, float* lse, ConstVector sinks, std::int64_t T, std::int64_t heads,
                     std::int64_t head_dim);

/// o[T, a·d] and lse[T, a] of one rank's keys as a part of what all ranks' keys give, in place: o exp(lse − all), lse =
/// all, the log-sum-exp over parts[ranks, T, a], of which this rank's is at its place. Added up over the ranks, o is
/// attention over all keys. Every rank finds the same bits of lse. Without a key anywhere: 0 and -inf.
void attention_part(KernelContext&, Matrix o, float* lse, const float* parts, std::int64_t ranks, std::int64_t T,
                    std::int64_t heads, std::int64_t head_dim);

/// dsinks[a] (+)= -Σ_t exp(sink - lse'[t]) · (do[t] · o'[t]), summed over tokens in their order.
void attention_sinks_backward(KernelContext&, ConstMatrix d_o, ConstMatrix o, const float* lse, ConstVector sinks,
                              float* d_sinks, std::int64_t T, std::int64_t heads, std::int64_t head_dim, Write);

}  // namespace hotbunk::kernels
