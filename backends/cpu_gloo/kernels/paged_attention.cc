#include "backends/cpu_gloo/kernels/paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int kScratchSlot = 3;
constexpr std::int64_t kMaxGroup = 128;  // query heads per kv head (multi-query attention of the largest models: 128)
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

/// Where the keys of positions [p0, p0 + n) lie.
template <class P>
void find_keys(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
               std::int64_t kv_head, const P** keys) {
  std::int64_t block = p0 / pool.block_size, offset = p0 % pool.block_size;
  for (std::int64_t i = 0; i < n; ++i) {
    keys[i] = pool.key(blocks[block], offset, kv_head);
    if (++offset == pool.block_size) ++block, offset = 0;
  }
}

/// One online-softmax step of one query head; o stays unnormalised.
struct Running {
  float max = kNegInf;
  float sum = 0.0f;
};
template <class P>
HB_INLINE void attend_step(const float* q, const P* const* keys, std::int64_t n, std::int64_t d,
                           std::int64_t value_distance, Running& run, float* o) {
  alignas(64) std::array<float, kStep> s;
  for (std::int64_t i = 0; i < n; ++i) s[static_cast<std::size_t>(i)] = dot(q, keys[i], d);
  std::fill(s.begin() + n, s.end(), kNegInf);  // weight 0
  Vf best = splat(run.max);
  for (std::int64_t i = 0; i < kStep; i += kLanes) best = max(best, load(s.data() + i));
  const float new_max = max_lanes(best);
  Vf total{};
  for (std::int64_t i = 0; i < kStep; i += kLanes) {
    const Vf p = exp(load(s.data() + i) - new_max);
    store(s.data() + i, p);
    total += p;
  }
  const float shrink = std::exp(run.max - new_max);
  run.sum = run.sum * shrink + sum_lanes(total);
  run.max = new_max;
  for_vectors(d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
    Vf acc = ld(o + j) * shrink;
    for (std::int64_t i = 0; i < n; ++i) acc += ld(keys[i] + value_distance + j) * s[static_cast<std::size_t>(i)];
    st(o + j, acc);
  });
}

/// o[group][d] of the query heads of one kv head (scaled, fp32, [group][d]) over positions [0, context): the heads go
/// step by step together, so that keys and values come from L1 after the first.
template <class P>
void attend(const float* q, std::int64_t group, const PoolView<P>& pool, const std::int32_t* blocks,
            std::int64_t context, std::int64_t kv_head, float* o) {
  const std::int64_t d = pool.d;
  std::array<const P*, kStep> keys;
  std::array<Running, kMaxGroup> run;
  std::fill_n(o, group * d, 0.0f);
  for (std::int64_t p0 = 0; p0 < context; p0 += kStep) {
    const std::int64_t n = std::min(kStep, context - p0);
    find_keys(pool, blocks, p0, n, kv_head, keys.data());
    for (std::int64_t h = 0; h < group; ++h)
      attend_step(q + h * d, keys.data(), n, d, pool.value_distance(), run[static_cast<std::size_t>(h)], o + h * d);
  }
  for (std::int64_t h = 0; h < group; ++h) {
    const float sum = run[static_cast<std::size_t>(h)].sum;
    const float norm = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (std::int64_t j = 0; j < d; ++j) o[h * d + j] *= norm;
  }
}

/// Sequence and context length of one query row.
struct Query {
  std::int64_t sequence;
  std::int64_t context;
};

template <class QueryOf>
void attend_rows(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, const KvPool& pool, const PagedContext& paged,
                 std::int64_t rows, float scale, Matrix o, QueryOf&& query_of) {
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  HB_CHECK(qkv.dtype == o.dtype, "paged attention: {} to {}", name_of(qkv.dtype), name_of(o.dtype));
  const std::int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  HB_CHECK(group <= kMaxGroup, "{} query heads per kv head, at most {}", group, kMaxGroup);
  auto* scratch = static_cast<float*>(
      ctx.scratch(kScratchSlot, static_cast<std::size_t>(ctx.num_threads() * 2 * group * d) * sizeof(float)));
  with_float_type(qkv.dtype, [&](auto q_tag) {
    using E = decltype(q_tag);
    with_float_type(pool.dtype, [&](auto p_tag) {
      using P = decltype(p_tag);
      const PoolView<P> view{static_cast<const P*>(pool.data), pool.block_size, shape.num_kv_heads, d};
      std::int64_t longest = 0;
      for (std::int64_t r = 0; r < rows; ++r) longest = std::max(longest, query_of(r).context);
      // A task is one row and kv head: its query heads read the same keys, from L1 after the first.
      const bool worth_team = rows * longest * shape.num_heads * d > 65536;
      parallel_tasks(ctx, rows * shape.num_kv_heads, worth_team, [&](std::int64_t i, int thread) {
        const std::int64_t r = i / shape.num_kv_heads, kv_head = i % shape.num_kv_heads;
        const Query query = query_of(r);
        float* q = scratch + thread * 2 * group * d;
        float* out = q + group * d;
        const E* src = row<E>(qkv, r) + kv_head * group * d;  // the group's heads lie side by side
        E* dst = row<E>(o, r) + kv_head * group * d;
        for_vectors(group * d,
                    [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(q + j, ld(src + j) * scale); });
        attend(q, group, view, paged.block_table + query.sequence * paged.max_blocks, query.context, kv_head, out);
        for_vectors(group * d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(dst + j, ld(out + j)); });
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
