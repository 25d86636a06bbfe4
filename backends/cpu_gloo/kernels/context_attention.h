// Causal attention of packed sequences that several ranks share by chunks, in tiles: a rank's queries against its own
// keys and values, another rank's, or everybody's.
#pragma once
#include <cstdint>
#include <span>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

/// Of each sequence, cut into 2 · ranks equal chunks, rank r has the r-th and then the r-th from the end.
struct ContextShare {
  std::int64_t ranks = 1;
  std::int64_t place = 0;      // whose queries
  std::int64_t source = 0;     // whose keys and values, where they are one rank's
  bool all = false;            // where they are everybody's, rank by rank
  std::int64_t kv_tokens = 0;  // rows of one rank's keys and values
  constexpr std::int64_t parts() const { return all ? ranks : 1; }
  constexpr std::int64_t owner(std::int64_t part) const { return all ? part : source; }
};

/// o[t, head] and lse[t, head] as attention_forward() has them, over the keys that are here. qkv: [T, (a+2k)·d], of
/// which the queries are read; kv: [parts · kv_tokens, 2k·d], keys then values (heads.h: with values of another width
/// k·(d+dv)). cu_seqlens: S+1 offsets of the rank's tokens, each sequence of an even number of them. A query that sees
/// none of the keys gets o = 0 and lse = -inf; with Write::accumulate o and lse are those of other keys, and what is
/// found is merged with them. o: fp32, or qkv's dtype.
void context_attention_forward(KernelContext&, ConstMatrix qkv, ConstMatrix kv, HeadShape,
                               std::span<const std::int32_t> cu_seqlens, const ContextShare&, Scores, Matrix o,
                               float* lse, Write);

/// Of o and lse over all keys: d_q [T, a·d] fp32, overwritten or added to, and d_kv [parts · kv_tokens, 2k·d] fp32,
/// overwritten whole, as far as the queries and keys that are here make them.
void context_attention_backward(KernelContext&, ConstMatrix qkv, ConstMatrix kv, ConstMatrix o, ConstMatrix d_o,
                                const float* lse, HeadShape, std::span<const std::int32_t> cu_seqlens,
                                const ContextShare&, Scores, Matrix d_q, Write, Matrix d_kv);

}  // namespace hotbunk::kernels
