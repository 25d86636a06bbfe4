#include "backends/cpu_gloo/kernels/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "backends/cpu_gloo/kernels/attention_step.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

/// One layer's pool as rows: block b holds block_size·kv_heads key rows of d elements, then as many value rows of dv.
template <class P>
struct PoolView {
  const P* data;
  std::int64_t block_size, kv_heads, d, dv;
  const P* block(std::int64_t number) const { return data + number * block_size * kv_heads * (d + dv); }
  /// Token p that it holds of the sequence whose blocks these are.
  const P* key_at(const std::int32_t* blocks, std::int64_t p, std::int64_t head) const {
    return block(blocks[p / block_size]) + (p % block_size * kv_heads + head) * d;
  }
  const P* value_at(const std::int32_t* blocks, std::int64_t p, std::int64_t head) const {
    return block(blocks[p / block_size]) + block_size * kv_heads * d + (p % block_size * kv_heads + head) * dv;
  }
};

/// Tokens [p0, p0 + n) of one sequence and kv head as tiles; p0 is a multiple of kBlock.
template <class P>
void pack_keys(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
               std::int64_t kv_head, float* k_t, float* v) {
  const std::int64_t dp = round_up(pool.dv, kLanes);
  pack_transposed([&](std::int64_t p) { return pool.key_at(blocks, p0 + p, kv_head); }, n, pool.d, k_t);
  for (std::int64_t p = 0; p < n; ++p)
    pack_rows(pool.value_at(blocks, p0 + p, kv_head), 0, 1, pool.dv, 1.0f, v + p * dp, dp);
}

/// Tokens [begin, end) of those that a pool holds of a sequence.
struct Tokens {
  std::int64_t begin = 0, end = 0;
};

/// Up to here so many query heads of a kv head read keys and values where they lie; more have them packed once.
constexpr std::int64_t kHeadsInPlace = 4;

/// s[H][kBlock] = q[H][d] · keys, n of them from position p0: kLanes keys at a time are turned in registers. What
/// stands behind them up to a whole vector means nothing.
template <int H, class P>
void score_in_place(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
                    std::int64_t kv_head, const float* q, float* s) {
  const P* keys[kBlock];
  for (std::int64_t p = 0; p < n; ++p) keys[p] = pool.key_at(blocks, p0 + p, kv_head);
  for (std::int64_t p = n; p < round_up(n, kLanes); ++p) keys[p] = keys[n - 1];
  for (std::int64_t p = 0; p < n; p += kLanes) {
    for (std::int64_t i = p + kLanes; i < std::min(p + 2 * kLanes, n); ++i) prefetch_row(keys[i], pool.d);
    Vf acc[H] = {};
    for (std::int64_t c = 0; c < pool.d; c += kLanes) {
      Vf k_t[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) k_t[i] = load(keys[p + i] + c);
      transpose(k_t);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) acc[h] += splat(q[h * pool.d + c + i]) * k_t[i];
    }
    for (int h = 0; h < H; ++h) store(s + h * kBlock + p, acc[h]);
  }
}

/// o[H][dv] (+)= s[H][kBlock] · the values of n positions from p0.
template <int H, class P>
void sum_in_place(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
                  std::int64_t kv_head, const float* s, float* o, bool accumulate) {
  constexpr int kVectors = H == 1 ? 8 : 2;  // of a value, per pass
  const P* values[kBlock];
  for (std::int64_t p = 0; p < n; ++p) values[p] = pool.value_at(blocks, p0 + p, kv_head);
  const auto pass = [&]<int NV>(std::int64_t c, std::integral_constant<int, NV>) HB_FORCE_INLINE {
    Vf acc[H][NV];
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[h][v] = accumulate ? load(o + h * pool.dv + c + v * kLanes) : Vf{};
    for (std::int64_t p = 0; p < n; ++p) {
      Vf value[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) value[v] = load(values[p] + c + v * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const Vf weight = splat(s[h * kBlock + p]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[h][v] += weight * value[v];
      }
    }
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(o + h * pool.dv + c + v * kLanes, acc[h][v]);
  };
  for (std::int64_t p = 0; p < std::min(n, kPrefetchRows); ++p) prefetch_row(values[p], pool.dv);
  std::int64_t c = 0;
  for (; c + kVectors * kLanes <= pool.dv; c += kVectors * kLanes) pass(c, std::integral_constant<int, kVectors>{});
  for (; c < pool.dv; c += kLanes) pass(c, std::integral_constant<int, 1>{});
}

/// One block for H query heads, which stand in the tile from row r0 on: attend_block without tiles of keys and values.
template <int H, class P>
void attend_in_place(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
                     std::int64_t kv_head, const AttentionTile& t, std::int64_t r0, const SeenKeys& seen, float softcap,
                     bool first) {
  float *s = t.s + r0 * kBlock, *o = t.o + r0 * t.dp;
  score_in_place<H>(pool, blocks, p0, n, kv_head, t.q + r0 * pool.d, s);
  weigh_scores(t, r0, H, round_up(n, kLanes), seen, softcap, first);
  sum_in_place<H>(pool, blocks, p0, n, kv_head, s, o, !first);
}

/// Asks for a share of the keys and values of positions [p0, p0 + n), of kv heads that lie side by side: whole rows, in
/// the order of the memory. What one head reads of them are pieces a row apart.
template <class P>
void ask_for_rows(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n,
                  std::int64_t kv_head, std::int64_t heads, std::int64_t share) {
  constexpr std::int64_t kLine = 64 / sizeof(P);
  for (std::int64_t p = p0 + n * share / heads; p < p0 + n * (share + 1) / heads; ++p) {
    const P *keys = pool.key_at(blocks, p, kv_head), *values = pool.value_at(blocks, p, kv_head);
    for (std::int64_t c = 0; c < heads * pool.d; c += kLine) __builtin_prefetch(keys + c, 0, 2);
    for (std::int64_t c = 0; c < heads * pool.dv; c += kLine) __builtin_prefetch(values + c, 0, 2);
  }
}

struct Call {
  ConstMatrix qkv;
  HeadShape shape;
  const PagedContext& paged;
  Scores scores;
  Matrix o;
  float* lse;  // [T, a], or none
  void put_lse(std::int64_t row, std::int64_t head, float value) const {
    if (lse != nullptr) lse[row * shape.num_heads + head] = value;
  }
  std::int64_t group() const { return shape.num_heads / shape.num_kv_heads; }
  const std::int32_t* blocks(std::int64_t sequence) const { return paged.block_table + sequence * paged.max_blocks; }
  /// Of the tokens that the pool holds, those that a query at this position sees.
  Tokens seen(std::int64_t position) const {
    return {paged.share.held(scores.first_seen(position)), paged.share.held(position + 1)};
  }
  /// The same of a sequence's last position; none without a context.
  Tokens seen_last(std::int64_t sequence) const {
    const std::int64_t context = paged.context_len[sequence];
    return context > 0 ? seen(context - 1) : Tokens{};
  }
};

template <class E>
void put_outputs(const Call& call, std::int64_t at, std::int64_t head, std::int64_t heads, const AttentionTile& t,
                 std::int64_t r0) {
  const std::int64_t dv = call.shape.dv();
  E* out = row<E>(call.o, at) + head * dv;
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t r = r0 + h;
    unpack_rows(t.o + r * t.dp, t.dp, 1, dv, 1.0f / t.state.sum[r], out + h * dv, dv);
    call.put_lse(at, head + h, t.state.max[r] + std::log(t.state.sum[r]));
  }
}

/// Heads [head, head + heads) of a row that sees no key.
template <class E>
void put_nothing(const Call& call, std::int64_t at, std::int64_t head, std::int64_t heads) {
  const std::int64_t dv = call.shape.dv();
  std::fill_n(row<E>(call.o, at) + head * dv, heads * dv, E{});
  for (std::int64_t h = 0; h < heads; ++h) call.put_lse(at, head + h, -std::numeric_limits<float>::infinity());
}

/// Heads [head, head + heads) of one kv head's group in a row of qkv, of keys that they all see: a tile's queries are
/// heads. tiles(p0): the block of keys from token p0 on, packed, and its values.
template <class E, class Tiles>
void attend_heads(const Call& call, std::int64_t at, std::int64_t head, std::int64_t heads, const Tokens& seen,
                  std::int64_t d, const AttentionTile& t, Tiles&& tiles) {
  if (seen.begin >= seen.end) return put_nothing<E>(call, at, head, heads);
  pack_rows(row<E>(call.qkv, at) + head * d, d, heads, d, call.scores.scale, t.q, d);
  const std::int64_t start = seen.begin / kBlock * kBlock;
  for (std::int64_t p0 = start; p0 < seen.end; p0 += kBlock) {
    const auto [k_t, v] = tiles(p0);
    attend_block(t, heads, d, k_t, v, {seen.begin - p0, seen.end - p0, 0}, call.scores.softcap, p0 == start);
  }
  put_outputs<E>(call, at, head, heads, t, 0);
}

/// The heads [first, first + heads) of one kv head's group at the last position of a sequence: a tile's queries are
/// heads, so that keys and values are packed once for all of them.
template <class E, class P>
void decode_task(const Call& call, const PoolView<P>& pool, std::int64_t s, std::int64_t kv_head, std::int64_t first,
                 std::int64_t heads, const AttentionTile& t) {
  const Tokens seen = call.seen_last(s);
  attend_heads<E>(call, s, kv_head * call.group() + first, heads, seen, pool.d, t, [&](std::int64_t p0) {
    pack_keys(pool, call.blocks(s), p0, std::min(kBlock, seen.end - p0), kv_head, t.k_t, t.v);
    return std::pair(t.k_t, t.v);
  });
}

/// All query heads of one kv head for rows [begin, end) of qkv, the last of sequence s, of which this pool holds a
/// part: how many keys a row sees more than the one before it depends on both, so each row is a tile of its own.
template <class E, class P>
void prefill_part(const Call& call, const PoolView<P>& pool, std::int64_t s, std::int64_t begin, std::int64_t end,
                  std::int64_t kv_head, const AttentionTile& t) {
  const std::int64_t first_position = call.paged.context_len[s] - (end - begin), group = call.group();
  HB_CHECK(first_position >= 0, "{} new tokens, but {} in the pool", end - begin, call.paged.context_len[s]);
  pack_keys(pool, call.blocks(s), 0, call.paged.share.held(call.paged.context_len[s]), kv_head, t.k_t, t.v);
  for (std::int64_t r = begin; r < end; ++r)
    for (std::int64_t first = 0; first < group; first += kBlock)
      attend_heads<E>(call, r, kv_head * group + first, std::min(kBlock, group - first),
                      call.seen(first_position + r - begin), pool.d, t,
                      [&](std::int64_t p0) { return std::pair(t.k_t + p0 * pool.d, t.v + p0 * t.dp); });
}

/// Kv heads [kv_head, kv_head + kv_heads) with groups of H at the last position of a sequence, block by block for all
/// of them; each has kLanes rows of the tile.
template <int H, class E, class P>
void decode_in_place(const Call& call, const PoolView<P>& pool, std::int64_t s, std::int64_t kv_head,
                     std::int64_t kv_heads, const AttentionTile& t) {
  static_assert(kHeadsInPlace <= kLanes);
  const std::int64_t d = pool.d;
  const Tokens seen = call.seen_last(s);
  if (seen.begin >= seen.end) return put_nothing<E>(call, s, kv_head * H, kv_heads * H);
  for (std::int64_t i = 0; i < kv_heads; ++i)
    pack_rows(row<E>(call.qkv, s) + (kv_head + i) * H * d, d, H, d, call.scores.scale, t.q + i * kLanes * d, d);
  t.state.reset();
  const std::int64_t start = seen.begin / kBlock * kBlock;
  for (std::int64_t p0 = start; p0 < seen.end; p0 += kBlock) {
    const std::int64_t next = std::min(p0 + kBlock, seen.end);
    const SeenKeys keys{seen.begin - p0, seen.end - p0, 0};
    for (std::int64_t i = 0; i < kv_heads; ++i) {
      ask_for_rows(pool, call.blocks(s), next, std::min(kBlock, seen.end - next), kv_head, kv_heads, i);
      attend_in_place<H>(pool, call.blocks(s), p0, next - p0, kv_head + i, t, i * kLanes, keys, call.scores.softcap,
                         p0 == start);
    }
  }
  for (std::int64_t i = 0; i < kv_heads; ++i) put_outputs<E>(call, s, (kv_head + i) * H, H, t, i * kLanes);
}

/// Kv heads of a sequence that one task takes: as many as leave each thread two tasks.
std::int64_t heads_of_task(std::int64_t sequences, std::int64_t kv_heads, std::int64_t threads) {
  std::int64_t together = 1;
  for (std::int64_t n = 2; n <= std::min(kv_heads, kBlock / kLanes); ++n)
    if (kv_heads % n == 0 && sequences * (kv_heads / n) >= 2 * threads) together = n;
  return together;
}

/// All query heads of one kv head for rows [begin, end) of qkv, the last of sequence s.
template <class E, class P>
void prefill_task(const Call& call, const PoolView<P>& pool, std::int64_t s, std::int64_t begin, std::int64_t end,
                  std::int64_t kv_head, const AttentionTile& t) {
  const std::int64_t d = pool.d, dv = pool.dv, dp = t.dp, context = call.paged.context_len[s];
  const std::int64_t first_position = context - (end - begin);
  HB_CHECK(first_position >= 0, "{} new tokens, but {} in the pool", end - begin, context);
  pack_keys(pool, call.blocks(s), 0, context, kv_head, t.k_t, t.v);
  for (std::int64_t head = kv_head * call.group(); head < (kv_head + 1) * call.group(); ++head)
    for (std::int64_t r0 = begin; r0 < end; r0 += kBlock) {
      const std::int64_t rows = std::min(kBlock, end - r0), position = first_position + r0 - begin;
      pack_rows(row<E>(call.qkv, r0) + head * d, call.qkv.ld, rows, d, call.scores.scale, t.q, d);
      const std::int64_t start = call.scores.first_seen(position) / kBlock * kBlock;
      for (std::int64_t p0 = start; p0 < position + rows; p0 += kBlock)
        attend_block(t, rows, d, t.k_t + p0 * d, t.v + p0 * dp, seen_keys(call.scores, position, p0, 1),
                     call.scores.softcap, p0 == start);
      for (std::int64_t r = 0; r < rows; ++r) {
        unpack_rows(t.o + r * dp, dp, 1, dv, 1.0f / t.state.sum[r], row<E>(call.o, r0 + r) + head * dv, call.o.ld);
        call.put_lse(r0 + r, head, t.state.max[r] + std::log(t.state.sum[r]));
      }
    }
}

void check_call(const Call& call) {
  const HeadShape& shape = call.shape;
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  HB_CHECK(call.scores.scale > 0.0f, "scale {}", call.scores.scale);
  HB_CHECK(call.qkv.dtype == call.o.dtype, "paged attention: {} to {}", name_of(call.qkv.dtype), name_of(call.o.dtype));
}

/// task(E{}, pool view, i, tiles of the thread) for i in [0, tasks); tiles hold `longest` tokens.
template <class Task>
void run_tasks(KernelContext& ctx, const Call& call, const KvPool& pool, std::int64_t tasks, std::int64_t longest,
               bool worth_team, Task&& task) {
  const std::int64_t d = call.shape.head_dim, dv = call.shape.dv(), dp = round_up(dv, kLanes);
  const std::int64_t share = round_up(AttentionTile::floats(longest, d, dp), 1024);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kScratchSlot, static_cast<std::size_t>(share * ctx.num_threads()) * 4));
  with_float_type(call.qkv.dtype, [&](auto q_tag) {
    with_float_type(pool.dtype, [&](auto p_tag) {
      using P = decltype(p_tag);
      const PoolView<P> view{static_cast<const P*>(pool.data), pool.block_size, call.shape.num_kv_heads, d, dv};
      parallel_tasks(ctx, tasks, worth_team, [&](std::int64_t i, int thread) {
        task(q_tag, view, i, AttentionTile(scratch + thread * share, longest, d, dp));
      });
    });
  });
}

}  // namespace

std::vector<std::int32_t> held_slots(const std::int32_t* slots, std::int64_t T, KeyShare share) {
  // A block begins at a multiple of the ranks, so that a slot's place is its position's.
  std::vector<std::int32_t> out(slots, slots + T);
  for (std::int32_t& slot : out)
    if (slot >= 0) slot = slot % share.ranks == share.place ? static_cast<std::int32_t>(slot / share.ranks) : -1;
  return out;
}

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
                            const PagedContext& paged, std::int64_t S, Scores scores, Matrix o, float* lse) {
  const Call call{qkv, shape, paged, scores, o, lse};
  check_call(call);
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < S; ++s) longest = std::max<std::int64_t>(longest, paged.context_len[s]);
  const std::int64_t group = call.group(), d = shape.head_dim, kv_heads = shape.num_kv_heads;
  const bool worth_team = S * longest * shape.num_heads * d > 65536;
  if (group <= kHeadsInPlace && d % kLanes == 0 && shape.dv() % kLanes == 0) {
    const std::int64_t together = heads_of_task(S, kv_heads, ctx.num_threads()), tasks = kv_heads / together;
    const auto run = [&]<int H>(std::integral_constant<int, H>) {
      run_tasks(ctx, call, pool, S * tasks, kBlock, worth_team,
                [&]<class E>(E, const auto& view, std::int64_t i, const AttentionTile& t) {
                  decode_in_place<H, E>(call, view, i / tasks, i % tasks * together, together, t);
                });
    };
    if (group == 1) return run(std::integral_constant<int, 1>{});
    if (group == 2) return run(std::integral_constant<int, 2>{});
    if (group == 3) return run(std::integral_constant<int, 3>{});
    return run(std::integral_constant<int, kHeadsInPlace>{});
  }
  const std::int64_t tiles = (group + kBlock - 1) / kBlock;  // of query heads, per kv head
  run_tasks(ctx, call, pool, S * kv_heads * tiles, kBlock, worth_team,
            [&]<class E>(E, const auto& view, std::int64_t i, const AttentionTile& t) {
              const std::int64_t first = i % tiles * kBlock, pair = i / tiles;
              decode_task<E>(call, view, pair / kv_heads, pair % kv_heads, first, std::min(kBlock, group - first), t);
            });
}

void paged_prefill_attention(KernelContext& ctx, ConstMatrix qkv, HeadShape shape, const KvPool& pool,
                             const PagedContext& paged, std::span<const std::int32_t> cu_seqlens, Scores scores,
                             Matrix o, float* lse) {
  const Call call{qkv, shape, paged, scores, o, lse};
  check_call(call);
  std::int64_t longest = 0, work = 0;
  const auto S = std::ssize(cu_seqlens) - 1;
  for (std::int64_t s = 0; s < S; ++s) {
    const auto at = static_cast<std::size_t>(s);
    if (cu_seqlens[at] == cu_seqlens[at + 1]) continue;
    longest = std::max<std::int64_t>(longest, paged.context_len[s]);
    work += std::int64_t{paged.context_len[s]} * (cu_seqlens[at + 1] - cu_seqlens[at]);
  }
  run_tasks(ctx, call, pool, std::max<std::int64_t>(S, 0) * shape.num_kv_heads, longest, work > 256,
            [&]<class E>(E, const auto& view, std::int64_t i, const AttentionTile& t) {
              const std::int64_t s = i / shape.num_kv_heads;
              const std::int64_t begin = cu_seqlens[static_cast<std::size_t>(s)];
              const std::int64_t end = cu_seqlens[static_cast<std::size_t>(s) + 1];
              if (begin < end && paged.share.ranks > 1)
                prefill_part<E>(call, view, s, begin, end, i % shape.num_kv_heads, t);
              else if (begin < end) prefill_task<E>(call, view, s, begin, end, i % shape.num_kv_heads, t);
            });
}

}  // namespace hotbunk::kernels
