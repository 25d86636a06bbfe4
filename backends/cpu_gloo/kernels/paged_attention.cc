// Attention over pages: prefill by tiles, decoding where keys and values lie. Longer than a room: both share the tile,
// the split over threads and what a sequence sees.
#include "backends/cpu_gloo/kernels/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "backends/cpu_gloo/kernels/attention_step.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr int kScratchSlot = 3;

/// One layer's pool as rows: block b holds block_size key rows of d elements for each kv head, behind the last head's
/// keys as many value rows of dv.
template <class P>
struct PoolView {
  const P* data;
  std::int64_t block_size, kv_heads, d, dv;
  /// From one kv head's rows in a block to the next head's.
  std::int64_t key_pitch() const { return block_size * d; }
  std::int64_t value_pitch() const { return block_size * dv; }
  const P* block(std::int64_t number) const { return data + number * kv_heads * (key_pitch() + value_pitch()); }
  /// Token p that it holds of the sequence whose blocks these are.
  const P* key_at(const std::int32_t* blocks, std::int64_t p, std::int64_t head) const {
    return block(blocks[p / block_size]) + head * key_pitch() + p % block_size * d;
  }
  const P* value_at(const std::int32_t* blocks, std::int64_t p, std::int64_t head) const {
    return block(blocks[p / block_size]) + kv_heads * key_pitch() + head * value_pitch() + p % block_size * dv;
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

constexpr std::int64_t kRowsAtOnce = 16;  // read, while the next ones are asked for: both stay in the first cache
constexpr int kKeyVectors = kRowsAtOnce / kLanes;
static_assert(kBlock % kRowsAtOnce == 0);

/// Where a block's rows of one kv head begin, for each of its positions.
template <class P>
struct Rows {
  const P *keys[kBlock], *values[kBlock];
  Rows() = default;
  Rows(const PoolView<P>& pool, const std::int32_t* blocks, std::int64_t p0, std::int64_t n, std::int64_t kv_head) {
    for (std::int64_t p = 0; p < n;) {  // those in one block of the pool lie behind each other
      const P *key = pool.key_at(blocks, p0 + p, kv_head), *value = pool.value_at(blocks, p0 + p, kv_head);
      const std::int64_t end = std::min(n, p + pool.block_size - (p0 + p) % pool.block_size);
      for (; p < end; ++p, key += pool.d, value += pool.dv) keys[p] = key, values[p] = value;
    }
    std::fill(keys + n, keys + kBlock, keys[n - 1]);
  }
};

/// `count` rows of `heads` kv heads: row r of head h has `width` elements from rows[r] + at + h·pitch.
template <class P>
struct HeadRows {
  const P* const* rows;
  std::int64_t count, at, heads, pitch, width;
  HB_INLINE const P* row(std::int64_t r, std::int64_t head) const { return rows[r] + at + head * pitch; }
};

/// Rows that are read next, asked for a few lines at a time: a processor that waits for many at once waits with its
/// loads too.
template <class P>
class RowsAhead {
 public:
  /// All of them in `steps` steps.
  RowsAhead(const HeadRows<P>& of, std::int64_t steps)
      : of_(of), lines_((of.count * of.heads * ((of.width + kLine - 1) / kLine) + steps - 1) / steps) {
    if (of.count > 0) at_ = of.row(0, 0);
  }
  HB_INLINE void ask() {
    for (std::int64_t i = 0; i < lines_ && head_ < of_.heads; ++i) {
      __builtin_prefetch(at_ + column_, 0, 3);
      if ((column_ += kLine) >= of_.width) next_row();
    }
  }

 private:
  HB_INLINE void next_row() {
    column_ = 0;
    if (++row_ == of_.count) row_ = 0, ++head_;
    at_ = of_.row(row_, head_);
  }
  static constexpr std::int64_t kLine = 64 / sizeof(P);
  const HeadRows<P> of_;
  const std::int64_t lines_;
  const P* at_ = nullptr;
  std::int64_t row_ = 0, head_ = 0, column_ = 0;
};

/// Where a second pass over rows asks for nothing more.
struct NoRowsAhead {
  void ask() {}
};

/// G kv heads of H query heads each: s[G·H][kBlock] = q[G·H][d] · kRowsAtOnce keys, turned in registers. Four chains
/// beside each other do not wait for themselves, and leave room for the keys.
template <int G, int H, class P>
HB_INLINE void score_keys(const HeadRows<P>& keys, const float* q, float* s, RowsAhead<P>& ahead) {
  constexpr int kVectors = G * H * kKeyVectors <= 4 ? kKeyVectors : 1;  // of keys
  for (int first = 0; first < kKeyVectors; first += kVectors) {
    Vf acc[G][kVectors][H] = {};
    for (std::int64_t c = 0; c < keys.width; c += kLanes)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          ahead.ask();
          Vf k_t[kLanes];
          load_columns(keys.rows + (first + v) * kLanes, keys.at + g * keys.pitch + c, k_t);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) acc[g][v][h] += splat(q[(g * H + h) * keys.width + c + i]) * k_t[i];
        }
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) store(s + (g * H + h) * kBlock + (first + v) * kLanes, acc[g][v][h]);
  }
}

/// G kv heads of H query heads each: o[G·H][dv] (+)= s[G·H][kBlock] · the values, NV vectors of each from column c.
template <int G, int H, int NV, class P, class Ahead>
HB_INLINE void sum_vectors(const HeadRows<P>& values, std::int64_t c, const float* s, float* o, bool accumulate,
                           Ahead& ahead) {
  Vf acc[G][H][NV];
  const auto each = [&](auto&& body) HB_FORCE_INLINE {
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) body(acc[g][h][v], o + (g * H + h) * values.width + c + v * kLanes);
  };
  each([&](Vf& sum, const float* from) HB_FORCE_INLINE { sum = accumulate ? load(from) : Vf{}; });
  for (std::int64_t p = 0; p < values.count; ++p) {
    ahead.ask();
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) {
      const P* from = values.row(p, g) + c;
      asm("" : "+r"(from));  // one register, not one for each of its vectors
      Vf value[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) value[v] = load(from + v * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const Vf weight = splat(s[(g * H + h) * kBlock + p]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[g][h][v] += weight * value[v];
      }
    }
  }
  each([&](const Vf& sum, float* to) HB_FORCE_INLINE { store(to, sum); });
}

/// The same of whole values.
template <int G, int H, class P>
HB_INLINE void sum_in_place(const HeadRows<P>& values, const float* s, float* o, bool accumulate, RowsAhead<P>& ahead) {
  constexpr int kVectors = kLanes == 16 ? 4 : H == 1 ? 8 / G : 2;  // of a value, per pass
  const auto pass = [&](std::int64_t c, auto& asks) HB_FORCE_INLINE {
    if (c + kVectors * kLanes > values.width) return sum_vectors<G, H, 1>(values, c, s, o, accumulate, asks), kLanes;
    return sum_vectors<G, H, kVectors>(values, c, s, o, accumulate, asks), kVectors * kLanes;
  };
  NoRowsAhead nothing;
  for (std::int64_t c = pass(0, ahead); c < values.width;) c += pass(c, nothing);
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

/// Kv heads of a sequence from `kv_head` on.
struct SomeHeads {
  std::int64_t sequence, kv_head;
};

/// `kv_heads` kv heads with groups of H at the last position of a sequence, block by block for all of them:
/// attend_block without tiles of keys and values, a tile's queries the heads. Rows are read kRowsAtOnce at a time, keys
/// and then values, and meanwhile as many that come next are asked for: behind a block's values the next block's keys,
/// behind the last block those of `next`, the next task's, mostly this thread's.
template <int H, class E, class P>
void decode_in_place(const Call& call, const PoolView<P>& pool, SomeHeads own, std::optional<SomeHeads> next,
                     std::int64_t kv_heads, const AttentionTile& t) {
  constexpr std::int64_t kTogether = H == 1 ? 2 : 1;  // kv heads whose chains fit beside each other
  const auto [s, kv_head] = own;
  const std::int64_t d = pool.d;
  const Tokens seen = call.seen_last(s);
  if (seen.begin >= seen.end) return put_nothing<E>(call, s, kv_head * H, kv_heads * H);
  pack_rows(row<E>(call.qkv, s) + kv_head * H * d, d, kv_heads * H, d, call.scores.scale, t.q, d);
  t.state.reset();
  const auto rows_from = [&](SomeHeads of, std::int64_t p0, std::int64_t end) {
    return Rows<P>(pool, call.blocks(of.sequence), p0, std::min(kBlock, end - p0), of.kv_head);
  };
  // Of n rows those from `first` on, of the kv heads from i on.
  const auto some = [&](const P* const* rows, std::int64_t n, std::int64_t first, std::int64_t i, std::int64_t pitch,
                        std::int64_t width) {
    return HeadRows<P>{
        rows + first, std::min(kRowsAtOnce, n - first), i * pitch, std::min(kTogether, kv_heads - i), pitch, width};
  };
  const auto keys = [&](const Rows<P>& of, std::int64_t n, std::int64_t first, std::int64_t i) {
    return some(of.keys, n, first, i, pool.key_pitch(), d);
  };
  const auto values = [&](const Rows<P>& of, std::int64_t n, std::int64_t first, std::int64_t i) {
    return some(of.values, n, first, i, pool.value_pitch(), pool.dv);
  };
  const std::int64_t start = seen.begin / kBlock * kBlock;
  Rows<P> rows = rows_from(own, start, seen.end), following;
  for (std::int64_t p0 = start; p0 < seen.end; p0 += kBlock) {
    const std::int64_t n = std::min(kBlock, seen.end - p0);
    // use(the part, what comes behind it, its first kv head, its first row) of each part of the block.
    const auto each = [&](const auto& part_of, const HeadRows<P>& behind, auto&& use) {
      for (std::int64_t i = 0; i < kv_heads; i += kTogether)
        for (std::int64_t first = 0, after = kRowsAtOnce; first < n; first = after, after += kRowsAtOnce)
          use(part_of(rows, n, first, i),
              after < n                  ? part_of(rows, n, after, i)
              : i + kTogether < kv_heads ? part_of(rows, n, 0, i + kTogether)
                                         : behind,
              i, first);
    };
    each(keys, values(rows, n, 0, 0),
         [&](const HeadRows<P>& part, const HeadRows<P>& behind, std::int64_t i, std::int64_t first) {
           RowsAhead<P> ahead(behind, part.heads * kKeyVectors * d / kLanes);
           const float* q = t.q + i * H * d;
           float* scores = t.s + i * H * kBlock + first;
           if (part.heads == kTogether) score_keys<kTogether, H>(part, q, scores, ahead);
           else score_keys<1, H>(part, q, scores, ahead);
         });
    weigh_scores(t, 0, kv_heads * H, round_up(n, kLanes), {seen.begin - p0, seen.end - p0, 0}, call.scores.softcap,
                 p0 == start);
    std::int64_t then = 0;  // rows that come behind these
    const auto follow = [&](SomeHeads of, std::int64_t from, std::int64_t end) {
      then = std::min(kBlock, end - from);
      following = rows_from(of, from, end);
    };
    if (p0 + n < seen.end) follow(own, p0 + n, seen.end);
    else if (const Tokens others = next ? call.seen_last(next->sequence) : Tokens{}; others.begin < others.end)
      follow(*next, others.begin / kBlock * kBlock, others.end);
    each(values, keys(following, then, 0, 0),
         [&](const HeadRows<P>& part, const HeadRows<P>& behind, std::int64_t i, std::int64_t first) {
           RowsAhead<P> ahead(behind, part.count);
           const float* weights = t.s + i * H * kBlock + first;
           float* o = t.o + i * H * t.dp;
           const bool more = p0 != start || first > 0;
           if (part.heads == kTogether) sum_in_place<kTogether, H>(part, weights, o, more, ahead);
           else sum_in_place<1, H>(part, weights, o, more, ahead);
         });
    if (then > 0) rows = following;
  }
  put_outputs<E>(call, s, kv_head * H, kv_heads * H, t, 0);
}

/// Kv heads of a sequence that one task takes: as many as leave each thread two tasks.
std::int64_t heads_of_task(std::int64_t sequences, std::int64_t kv_heads, std::int64_t threads) {
  std::int64_t together = 1;
  for (std::int64_t n = 2; n <= std::min(kv_heads, kBlock / kHeadsInPlace); ++n)
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
      parallel_shares(ctx, tasks, worth_team, [&](std::int64_t i, int thread) {
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
  const std::int64_t d = shape.head_dim, width = shape.num_kv_heads * d;
  HB_CHECK(shape.dv() == d, "values of {} beside keys of {}", shape.dv(), d);
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
          auto* k_out = data + block * 2 * pool.block_size * width + offset * d;
          auto* v_out = k_out + pool.block_size * width;
          for (std::int64_t h = 0; h < shape.num_kv_heads; ++h)
            for_vectors(d, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
              st(k_out + h * pool.block_size * d + j, ld(k + h * d + j));
              st(v_out + h * pool.block_size * d + j, ld(v + h * d + j));
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
                  const auto heads_of = [&](std::int64_t task) {
                    return SomeHeads{task / tasks, task % tasks * together};
                  };
                  const auto next = i + 1 < S * tasks ? std::optional(heads_of(i + 1)) : std::nullopt;
                  decode_in_place<H, E>(call, view, heads_of(i), next, together, t);
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
