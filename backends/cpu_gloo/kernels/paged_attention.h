// Attention of rollout over a paged KV pool: writing new keys and values, decode, and prefill with context.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"

namespace hotbunk::kernels {

/// One layer's KV pool [num_blocks][2][kv_heads][block_size][d]: in a block first all keys, then all values, and of
/// these a kv head's behind each other, as decoding reads them.
/// Slot s of the pool = position s % block_size of block s / block_size.
struct KvPool {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
};

/// What one of `ranks` pools holds of every sequence: the positions p with p % ranks == place, as its tokens
/// 0, 1, 2, … .
struct KeyShare {
  std::int64_t ranks = 1, place = 0;
  /// How many of the first n positions: those before its token of that number.
  constexpr std::int64_t held(std::int64_t n) const { return n > place ? (n - place - 1) / ranks + 1 : 0; }
};

/// Which blocks hold a sequence's context: token i that this pool holds of sequence s lies in
/// block_table[s·max_blocks + i/block_size]; it stands at position i where there is one pool.
struct PagedContext {
  const std::int32_t* block_table = nullptr;  // [S, max_blocks]; entries beyond the context are not read
  std::int64_t max_blocks = 0;
  const std::int32_t* context_len = nullptr;  // [S] positions in the pools, those of this call included; 0 = idle slot
  KeyShare share = {};
};

/// The slots of one of share.ranks pools for those of a pool whose blocks have share.ranks times as many tokens; −1
/// where another one holds the token.
std::vector<std::int32_t> held_slots(const std::int32_t* slots, std::int64_t T, KeyShare);

/// Copies k and v of qkv[T, (a+2k)·d] to slots[t] of the pool (cast to its dtype); slots[t] == −1: skipped.
void kv_write(KernelContext&, ConstMatrix qkv, const std::int32_t* slots, std::int64_t T, HeadShape, const KvPool&);

/// One query token per sequence, at position context_len − 1, its own k and v already written. Rows of idle slots
/// (context_len 0) become zero, as do those of which this pool holds no key that they see. qkv: [S, (a+2k)·d] (only q
/// is read); o: [S, a·d]. A row's bits do not depend on the other rows or on the number of threads, and are
/// attention_forward's for the same fp32 token (attention_step.h). `lse`: [S, a], log-sum-exps, -inf where there are no
/// keys; nullptr: not asked for.
void paged_decode_attention(KernelContext&, ConstMatrix qkv, HeadShape, const KvPool&, const PagedContext&,
                            std::int64_t S, Scores, Matrix o, float* lse = nullptr);

/// Sequence s has cu_seqlens[s+1] − cu_seqlens[s] new tokens in qkv, the last of its context_len (chunked prefill and
/// shared prefixes included); their k and v are already written. o: [T, a·d]. Same bits per token as the decode kernel.
void paged_prefill_attention(KernelContext&, ConstMatrix qkv, HeadShape, const KvPool&, const PagedContext&,
                             std::span<const std::int32_t> cu_seqlens, Scores, Matrix o, float* lse = nullptr);

}  // namespace hotbunk::kernels
