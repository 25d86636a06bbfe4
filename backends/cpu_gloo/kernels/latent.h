// Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent of r numbers for each
// token, by a matrix; a key has behind that a rotated part of dr numbers, which all heads share.
//
//   q      [T, a·d]         d = dn + dr: of each head dn numbers, then dr that were rotated
//   kv     [T, a·(dn + dv)] of each head dn numbers of its key, then its value
//   qkv    [T, a·(2d + dv)] as attention takes them (heads.h), with a KV head for each query head
//   pool   [blocks][block_size][r + dr]: latents and rotated parts, all that an engine keeps of a token
#pragma once
#include <span>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"
#include "backends/cpu_gloo/kernels/paged_attention.h"

namespace hotbunk::kernels {

/// Widths of a rank's heads: a of them, each with dn + dr and dv.
struct LatentShape {
  std::int64_t heads = 0, nope = 0, rope = 0, value = 0;
  constexpr std::int64_t key() const { return nope + rope; }
  constexpr std::int64_t expanded() const { return heads * (nope + value); }
  constexpr HeadShape packed() const { return {heads, heads, key(), value}; }
};

/// qkv[t] of q[t], kv[t] and the shared part rotated[t]: nothing but copies. rotated: [T, dr].
void latent_heads(KernelContext&, ConstMatrix q, ConstMatrix kv, ConstMatrix rotated, const LatentShape&, Matrix qkv,
                  std::int64_t T);
/// Back: what all heads share is their sum, in fp32 and in their order.
void latent_heads_backward(KernelContext&, ConstMatrix d_qkv, const LatentShape&, Matrix d_q, Matrix d_kv,
                           Matrix d_rotated, std::int64_t T);

/// Copies latent[t] and rotated[t], of the pool's dtype, to slots[t]; -1: skipped.
void latent_write(KernelContext&, ConstMatrix latent, std::int64_t r, ConstMatrix rotated, std::int64_t dr,
                  const std::int32_t* slots, std::int64_t T, const KvPool&);

/// o[T, a·dv] of q[T, a·d] over what the pool keeps: for each sequence keys and values of its context are made again by
/// w[a·(dn + dv), r] (gemm.h's product) and attended as paged_prefill_attention() does. So a row's bits are those of
/// training's linear layer and attention_forward, where that product is row-invariant. All of one dtype. Rows of
/// sequences without context become zeros.
/// Where paged.share has several pools, each makes keys and values of what it holds and attends to these; `lse` as of
/// paged_prefill_attention(), or nullptr.
/// Costs context · a·(dn + dv)·r products for each sequence and step; moving w into q and o would save them and round
/// otherwise than training does.
void latent_paged_attention(KernelContext&, ConstMatrix q, const LatentShape&, const KvPool&, std::int64_t r,
                            ConstMatrix w, const PagedContext&, std::span<const std::int32_t> cu_seqlens, Scores,
                            Matrix o, float* lse = nullptr);

}  // namespace hotbunk::kernels
