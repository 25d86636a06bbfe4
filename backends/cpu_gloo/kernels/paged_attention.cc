#include "backends/cpu_gloo/kernels/paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kMaxHeadDim = 256;
/// Positions whose scores are formed before their values are read: one online-softmax step. Counted from position 0,
/// so that the order of sums depends on the query's position only.
constexpr std::int64_t kStep = 64;

/// One layer's pool as rows of d elements: block b holds block_size·kv_heads key rows, then as many value rows.
template <class P>
struct PoolView {
  const P* data;
  std::int64_t block_size, kv_heads, d;
  const P* key(std::int64_t block, std::int64_t offset, std::int64_t head) const {
    return data + ((block * 2 * block_size + offset) * kv_heads + head) * d;
  }
  std::int64_t value_distance() const { return block_size * kv_heads * d; }  // from a key to its value
};

template <class P>
HB_INLINE float dot(const float* q, const P* k, std::int64_t d) {
  Vf sum{};
  for_vectors(d, [&](std::int64_t j, auto ld, auto) HB_FORCE_INLINE { sum += ld(q + j) * ld(k + j); });
  return sum_lanes(sum);
}

/// o[d] of one query (scaled, fp32) over positions [0, context).
template <class P>
void attend(const float* q, const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t context,
            std::int64_t kv_head, float* o) {
  const std::int64_t d = pool.d;
  std::array<float, kStep> s;
  std::array<const P*, kStep> keys;
  float m = kNegInf, sum = 0.0f;
  std::fill_n(o, d, 0.0f);
  for (std::int64_t p0 = 0; p0 < context; p0 += kStep) {
    const std::int64_t n = std::min(kStep, context - p0);
    float new_m = m;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t p = p0 + i;
      const auto at = static_cast<std::size_t>(i);
      keys[at] = pool.key(blocks[p / pool.block_size], p % pool.block_size, kv_head);
      s[at] = dot(q, keys[at], d);
      new_m = std::max(new_m, s[at]);
    }
    Vf step_sum{};
    for_vectors(n,
                [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE { st(&s[0] + i, exp(ld(&s[0] + i) - new_m)); });
    for (std::int64_t i = 0; i < n; ++i) step_sum[i % kLanes] += s[static_cast<std::size_t>(i)];
    const float shrink = std::exp(m - new_m);
    sum = sum * shrink + sum_lanes(step_sum);
    m = new_m;
    for_vectors(d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
      Vf acc = ld(o + j) * shrink;
      for (std::int64_t i = 0; i < n; ++i)
        acc += ld(keys[static_cast<std::size_t>(i)] + pool.value_distance() + j) * s[static_cast<std::size_t>(i)];
      st(o + j, acc);
    });
  }
  const float norm = sum > 0.0f ? 1.0f / sum : 0.0f;
  for (std::int64_t j = 0; j < d; ++j) o[j] *= norm;
}

/// Sequence and context length of one query row.
struct Query {
  std::int64_t sequence;
  std::int64_t context;
};

template <class QueryOf>
void attend_rows(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, const KvPool& pool, const PagedContext& paged,
                 std::int64_t rows, float scale, Matrix o, QueryOf&& query_of) {
  HB_CHECK(shape.head_dim <= kMaxHeadDim, "head_dim {} > {}", shape.head_dim, kMaxHeadDim);
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  HB_CHECK(qkv.dtype == o.dtype, "paged attention: {} to {}", name_of(qkv.dtype), name_of(o.dtype));
  const std::int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  with_float_type(qkv.dtype, [&](auto q_tag) {
    using E = decltype(q_tag);
    with_float_type(pool.dtype, [&](auto p_tag) {
      using P = decltype(p_tag);
      const PoolView<P> view{static_cast<const P*>(pool.data), pool.block_size, shape.num_kv_heads, d};
      std::int64_t longest = 0;
      for (std::int64_t r = 0; r < rows; ++r) longest = std::max(longest, query_of(r).context);
      // A task is one row and kv head: its query heads read the same keys, from L1 after the first.
      const bool worth_team = rows * longest * shape.num_heads * d > 65536;
      parallel_tasks(ctx, rows * shape.num_kv_heads, worth_team, [&](std::int64_t i, int) {
        const std::int64_t r = i / shape.num_kv_heads, kv_head = i % shape.num_kv_heads;
        const Query query = query_of(r);
        alignas(64) std::array<float, kMaxHeadDim> q, out;
        for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const E* src = row<E>(qkv, r) + head * d;
          E* dst = row<E>(o, r) + head * d;
          for_vectors(d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(&q[0] + j, ld(src + j) * scale); });
          attend(q.data(), view, paged.block_table + query.sequence * paged.max_blocks, query.context, kv_head,
                 out.data());
          for_vectors(d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(dst + j, ld(&out[0] + j)); });
        }
      });
    });
  });
}

}  // namespace

void kv_write(KernelContext& ctx, ConstMatrix qkv, const std::int32_t* slots, std::int64_t T, HeadShape shape,
              const KvPool& pool) {
  const std::int64_t width = shape.num_kv_heads * shape.head_dim;
  for (std::int64_t t = 0; t < T; ++t)
    HB_CHECK(slots[t] >= -1 && slots[t] < pool.num_blocks * pool.block_size, "slot {} of {}", slots[t],
             pool.num_blocks * pool.block_size);
  with_float_type(qkv.dtype, [&](auto in_tag) {
    with_float_type(pool.dtype, [&](auto out_tag) {
      auto* data = static_cast<decltype(out_tag)*>(pool.data);
      parallel_for(ctx, T, rows_grain(4 * width), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          if (slots[t] < 0) continue;
          const std::int64_t block = slots[t] / pool.block_size, offset = slots[t] % pool.block_size;
          const auto* k = row<decltype(in_tag)>(qkv, t) + shape.k_offset();
          const auto* v = row<decltype(in_tag)>(qkv, t) + shape.v_offset();
          auto* k_out = data + (block * 2 * pool.block_size + offset) * width;
          auto* v_out = k_out + pool.block_size * width;
          for_vectors(width, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
            st(k_out + j, ld(k + j));
            st(v_out + j, ld(v + j));
          });
        }
      });
    });
  });
}

void paged_decode_attention(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, const KvPool& pool,
                            const PagedContext& paged, std::int64_t S, float scale, Matrix o) {
  attend_rows(ctx, qkv, shape, pool, paged, S, scale, o, [&](std::int64_t r) {
    return Query{r, paged.context_len[r]};
  });
}

void paged_prefill_attention(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, const KvPool& pool,
                             const PagedContext& paged, std::span<const std::int32_t> cu_seqlens, float scale,
                             Matrix o) {
  if (cu_seqlens.size() < 2) return;
  const std::int64_t rows = cu_seqlens.back();
  attend_rows(ctx, qkv, shape, pool, paged, rows, scale, o, [&](std::int64_t r) {
    const auto s = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), r) - cu_seqlens.begin() - 1;
    const std::int64_t after = cu_seqlens[static_cast<std::size_t>(s) + 1] - r;  // tokens from this one to the last
    return Query{s, paged.context_len[s] - after + 1};
  });
}

}  // namespace hotbunk::kernels
