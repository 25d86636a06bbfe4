#include "backends/cpu_gloo/kernels/latent.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"
#include "base/rounding.h"

namespace hotbunk::kernels {
namespace {

constexpr int kLatentScratch = 5;  // of its own: products and attention, which read it, have others

template <class E>
E* copied(const E* from, E* to, std::int64_t n) {
  std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(n) * sizeof(E));
  return to + n;
}

/// One token's keys and values of all heads; from a head's key to the next head's are key_pitch elements.
template <class E>
void expand_token(const LatentShape& shape, const E* kv, const E* rotated, E* keys, std::int64_t key_pitch, E* values,
                  std::int64_t value_pitch) {
  for (std::int64_t h = 0; h < shape.heads; ++h, keys += key_pitch, values += value_pitch) {
    copied(rotated, copied(kv, keys, shape.nope), shape.rope);
    copied(kv + shape.nope, values, shape.value);
    kv += shape.nope + shape.value;
  }
}

/// What the pool keeps of the first n tokens that it holds of a sequence, one below the other.
template <class E>
void take_context(const KvPool& pool, std::int64_t width, const std::int32_t* blocks, std::int64_t n, E* out) {
  for (std::int64_t p = 0; p < n; ++p) {
    const std::int64_t slot = blocks[p / pool.block_size] * pool.block_size + p % pool.block_size;
    out = copied(static_cast<const E*>(pool.data) + slot * width, out, width);
  }
}

struct LatentCall {
  const LatentShape& shape;
  const KvPool& pool;
  std::int64_t r;
  ConstMatrix w;
  Scores scores;
  KeyShare share;
};

/// The last n of a sequence's `length` tokens, of which the pool holds `context`; q, o and lse begin with theirs.
template <class E>
void attend_sequence(KernelContext& ctx, const LatentCall& call, const std::int32_t* blocks, std::int32_t length,
                     std::int64_t n, ConstMatrix q, Matrix o, float* lse) {
  const std::int64_t context = call.share.held(length);
  const LatentShape& shape = call.shape;
  const std::int64_t kept = call.r + shape.rope, of_keys = shape.heads * shape.key(), wide = shape.expanded();
  const auto room = [](std::int64_t elements) { return round_up(elements * static_cast<std::int64_t>(sizeof(E)), 64); };
  const std::int64_t latents = room(context * kept), expanded = room(context * wide);
  auto* scratch = static_cast<char*>(ctx.scratch(
      kLatentScratch,
      static_cast<std::size_t>(latents + expanded + room(context * (of_keys + shape.heads * shape.value)))));
  E *c = reinterpret_cast<E*>(scratch), *kv = reinterpret_cast<E*>(scratch + latents),
    *keys = reinterpret_cast<E*>(scratch + latents + expanded), *values = keys + context * of_keys;
  const DType dtype = call.pool.dtype;
  take_context(call.pool, kept, blocks, context, c);
  linear_forward(ctx, {c, dtype, kept}, call.w, {}, {kv, dtype, wide}, context, wide, call.r);
  parallel_for(ctx, context, rows_grain(2 * of_keys), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p)
      expand_token(shape, kv + p * wide, c + p * kept + call.r, keys + p * shape.key(), context * shape.key(),
                   values + p * shape.value, context * shape.value);
  });
  // One block of a pool that has all of it.
  const std::int32_t first = 0;
  const std::array<std::int32_t, 2> rows = {0, static_cast<std::int32_t>(n)};
  paged_prefill_attention(ctx, q, shape.packed(), {keys, dtype, 1, context}, {&first, 1, &length, call.share}, rows,
                          call.scores, o, lse);
}

}  // namespace

void latent_heads(KernelContext& ctx, ConstMatrix q, ConstMatrix kv, ConstMatrix rotated, const LatentShape& shape,
                  Matrix qkv, std::int64_t T) {
  HB_CHECK(q.dtype == qkv.dtype && kv.dtype == qkv.dtype && rotated.dtype == qkv.dtype, "latent_heads: mixed dtypes");
  const HeadShape packed = shape.packed();
  with_float_type(qkv.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(packed.width()), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* out = row<E>(qkv, t);
        copied(row<E>(q, t), out, packed.k_offset());
        expand_token(shape, row<E>(kv, t), row<E>(rotated, t), out + packed.k_offset(), shape.key(),
                     out + packed.v_offset(), shape.value);
      }
    });
  });
}

void latent_heads_backward(KernelContext& ctx, ConstMatrix d_qkv, const LatentShape& shape, Matrix d_q, Matrix d_kv,
                           Matrix d_rotated, std::int64_t T) {
  HB_CHECK(d_q.dtype == d_qkv.dtype && d_kv.dtype == d_qkv.dtype && d_rotated.dtype == d_qkv.dtype,
           "latent_heads_backward: mixed dtypes");
  const HeadShape packed = shape.packed();
  with_float_type(d_qkv.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(packed.width()), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const E* in = row<E>(d_qkv, t);
        copied(in, row<E>(d_q, t), packed.k_offset());
        const E *key = in + packed.k_offset(), *value = in + packed.v_offset();
        E* kv = row<E>(d_kv, t);
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          kv = copied(key + h * shape.key(), kv, shape.nope);
          kv = copied(value + h * shape.value, kv, shape.value);
        }
        E* shared = row<E>(d_rotated, t);
        for (std::int64_t i = 0; i < shape.rope; ++i) {
          float sum = 0.0f;
          for (std::int64_t h = 0; h < shape.heads; ++h) sum += as_f32(key[h * shape.key() + shape.nope + i]);
          shared[i] = from_f32<E>(sum);
        }
      }
    });
  });
}

void latent_write(KernelContext& ctx, ConstMatrix latent, std::int64_t r, ConstMatrix rotated, std::int64_t dr,
                  const std::int32_t* slots, std::int64_t T, const KvPool& pool) {
  HB_CHECK(latent.dtype == pool.dtype && rotated.dtype == pool.dtype, "latent_write: mixed dtypes");
  for (std::int64_t t = 0; t < T; ++t)
    HB_CHECK(slots[t] >= -1 && slots[t] < pool.num_blocks * pool.block_size, "slot {} of {}", slots[t],
             pool.num_blocks * pool.block_size);
  with_float_type(pool.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(r + dr), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        if (slots[t] < 0) continue;
        E* out = static_cast<E*>(pool.data) + slots[t] * (r + dr);
        copied(row<E>(rotated, t), copied(row<E>(latent, t), out, r), dr);
      }
    });
  });
}

void latent_paged_attention(KernelContext& ctx, ConstMatrix q, const LatentShape& shape, const KvPool& pool,
                            std::int64_t r, ConstMatrix w, const PagedContext& paged,
                            std::span<const std::int32_t> cu_seqlens, Scores scores, Matrix o, float* lse) {
  HB_CHECK(q.dtype == pool.dtype && w.dtype == pool.dtype && o.dtype == pool.dtype, "latent attention: mixed dtypes");
  const LatentCall call{shape, pool, r, w, scores, paged.share};
  with_float_type(pool.dtype, [&](auto tag) {
    using E = decltype(tag);
    for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
      const std::int64_t begin = cu_seqlens[s], n = cu_seqlens[s + 1] - begin;
      const std::int32_t length = paged.context_len[s];
      if (n == 0) continue;
      const Matrix out{row<E>(o, begin), o.dtype, o.ld};
      float* const sums = lse == nullptr ? nullptr : lse + begin * shape.heads;
      if (paged.share.held(length) > 0) {
        attend_sequence<E>(ctx, call, paged.block_table + static_cast<std::int64_t>(s) * paged.max_blocks, length, n,
                           {row<E>(q, begin), q.dtype, q.ld}, out, sums);
        continue;
      }
      for (std::int64_t t = 0; t < n; ++t) std::fill_n(row<E>(out, t), shape.heads * shape.value, E{});
      if (sums != nullptr) std::fill_n(sums, n * shape.heads, -std::numeric_limits<float>::infinity());
    }
  });
}

}  // namespace hotbunk::kernels
