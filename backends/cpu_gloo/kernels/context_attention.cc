// The tiles of attention.cc and attention_backward.cc, over chunks of sequences: of a query and a key only their
// positions say whether one sees the other.
#include "backends/cpu_gloo/kernels/context_attention.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/kernels/attention_step.h"
#include "backends/cpu_gloo/kernels/parallel.h"

namespace hotbunk::kernels {
namespace {

constexpr int kContextScratch = 3;

/// `length` tokens that follow one another, of which the first stands in this row, at this position of its sequence.
struct Segment {
  std::int64_t row = 0, position = 0, length = 0;
};

/// What one rank has of a sequence of which each rank has [begin, end): two segments.
std::array<Segment, 2> chunks_of(std::int64_t ranks, std::int64_t place, std::int64_t begin, std::int64_t end) {
  const std::int64_t length = (end - begin) / 2;
  return {Segment{begin, place * length, length}, {begin + length, (2 * ranks - 1 - place) * length, length}};
}

/// Whether any query of a tile sees any key of another.
bool meets(const Scores& scores, const Segment& queries, const Segment& keys) {
  const std::int64_t last = queries.position + queries.length - 1;
  return keys.position <= last && scores.first_seen(queries.position) < keys.position + keys.length;
}

/// The i-th block of a segment.
Segment block_of(const Segment& s, std::int64_t i) {
  return {s.row + i * kBlock, s.position + i * kBlock, std::min(kBlock, s.length - i * kBlock)};
}
std::int64_t blocks_of(const Segment& s) { return (s.length + kBlock - 1) / kBlock; }

/// One sequence and one KV head, on this rank.
struct Task {
  std::int64_t begin = 0, end = 0, kv_head = 0;
  std::size_t chunk = 0;  // of its queries, where they are taken one by one
};

struct Tasks {
  std::vector<Task> tasks;
  std::int64_t longest = 0;  // chunk
  bool worth_team = false;
};

Tasks make_tasks(const HeadShape& shape, std::span<const std::int32_t> cu_seqlens, std::size_t chunks) {
  HB_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "{} heads over {} kv heads",
           shape.num_heads, shape.num_kv_heads);
  Tasks out;
  std::int64_t work = 0;
  for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const std::int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    HB_CHECK(length % 2 == 0, "two chunks of {} tokens", length);
    if (length == 0) continue;
    out.longest = std::max(out.longest, length / 2), work += length * length;
    for (std::int64_t head = 0; head < shape.num_kv_heads; ++head)
      for (std::size_t chunk = 0; chunk < chunks; ++chunk)
        out.tasks.push_back({cu_seqlens[s], cu_seqlens[s + 1], head, chunk});
  }
  out.worth_team = work > 256;
  return out;
}

struct Keys {
  ConstMatrix kv;
  HeadShape shape;
  ContextShare share;
  Scores scores;
  /// Those of a task, rank by rank.
  std::vector<Segment> segments(const Task& t) const {
    std::vector<Segment> out;
    for (std::int64_t part = 0; part < share.parts(); ++part)
      for (Segment s : chunks_of(share.ranks, share.owner(part), t.begin, t.end)) {
        s.row += part * share.kv_tokens;
        out.push_back(s);
      }
    return out;
  }
  template <class E>
  const E* key(const Segment& s, std::int64_t head) const {
    return row<E>(kv, s.row) + head * shape.head_dim;
  }
  template <class E>
  const E* value(const Segment& s, std::int64_t head) const {
    return row<E>(kv, s.row) + shape.num_kv_heads * shape.head_dim + head * shape.dv();
  }
};

// --- forward --------------------------------------------------------------------------------------------------------

/// What the tile's row r found becomes part of a row of o, and of its log-sum-exp.
template <class O>
void put_row(const AttentionTile& t, std::int64_t r, bool found_any, std::int64_t d, Write write, O* o, float& lse) {
  const std::int64_t dp = round_up(d, kLanes);
  if (!found_any || t.state.sum[r] == 0.0f) {
    if (write == Write::accumulate) return;
    for (std::int64_t c = 0; c < d; ++c) o[c] = O{};
    lse = -std::numeric_limits<float>::infinity();
    return;
  }
  const float found = t.state.max[r] + std::log(t.state.sum[r]);
  if (write == Write::overwrite) {
    unpack_rows(t.o + r * dp, dp, 1, d, 1.0f / t.state.sum[r], o, d);
    lse = found;
    return;
  }
  const float top = std::max(lse, found), both = top + std::log(std::exp(lse - top) + std::exp(found - top));
  const float of_old = std::exp(lse - both), of_found = std::exp(found - both) / t.state.sum[r];
  for_vectors(d, [&](std::int64_t c, auto load_at, auto store_at) HB_FORCE_INLINE {
    store_at(o + c, load_at(o + c) * of_old + load_at(t.o + r * dp + c) * of_found);
  });
  lse = both;
}

template <class E, class O>
void run_forward(const Task& task, const AttentionTile& t, ConstMatrix qkv, const Keys& keys, Matrix o, float* lse,
                 Write write) {
  const HeadShape& shape = keys.shape;
  const std::int64_t d = shape.head_dim, dv = shape.dv(), dp = t.dp, group = shape.num_heads / shape.num_kv_heads;
  const Segment queries = chunks_of(keys.share.ranks, keys.share.place, task.begin, task.end)[task.chunk];
  std::vector<Segment> seen;
  for (const Segment& s : keys.segments(task))
    if (meets(keys.scores, queries, s)) seen.push_back(s);
  const std::int64_t room = round_up(queries.length, kBlock);  // of a segment's keys, packed
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * room;
    pack_transposed(keys.key<E>(seen[i], task.kv_head), keys.kv.ld, queries.length, d, t.k_t + at * d);
    pack_rows(keys.value<E>(seen[i], task.kv_head), keys.kv.ld, queries.length, dv, 1.0f, t.v + at * dp, dp);
  }
  for (std::int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head)
    for (std::int64_t i = 0; i < blocks_of(queries); ++i) {
      const Segment block = block_of(queries, i);
      pack_rows(row<E>(qkv, block.row) + head * d, qkv.ld, block.length, d, keys.scores.scale, t.q, d);
      bool first = true;
      for (std::size_t s = 0; s < seen.size(); ++s)
        for (std::int64_t j = 0; j < blocks_of(seen[s]); ++j) {
          const Segment of_keys = block_of(seen[s], j);
          if (!meets(keys.scores, block, of_keys)) continue;
          const std::int64_t at = static_cast<std::int64_t>(s) * room + j * kBlock;
          SeenKeys visible = seen_keys(keys.scores, block.position, of_keys.position, 1);
          visible.limit = of_keys.length;
          attend_block(t, block.length, d, t.k_t + at * d, t.v + at * dp, visible, keys.scores.softcap,
                       std::exchange(first, false));
        }
      for (std::int64_t r = 0; r < block.length; ++r)
        put_row(t, r, !first, dv, write, row<O>(o, block.row + r) + head * dv,
                lse[(block.row + r) * shape.num_heads + head]);
    }
}

// --- backward -------------------------------------------------------------------------------------------------------

/// One thread's buffers for a task: of all keys that are here, in segments of whole blocks, and of the queries' two.
struct BackwardTiles {
  float *k_t, *v_t;             // tiles of [d][kBlock], of values [v_d][kBlock]
  float *k, *dk, *dv;           // [keys][dp], dv [keys][vp]
  float *q, *d_o, *dq;          // [queries][dp], d_o [queries][vp], of one query head; q is scaled
  float *lse, *d_rows;          // [queries]
  float *p, *ds;                // [kBlock][kBlock]
  std::int64_t d, v_d, dp, vp;  // of keys and of values, and rounded up to whole vectors
  static std::int64_t floats(std::int64_t keys, std::int64_t queries, const HeadShape& shape) {
    const std::int64_t d = shape.head_dim, v = shape.dv(), dp = round_up(d, kLanes), vp = round_up(v, kLanes);
    return keys * (d + v + 2 * dp + vp) + queries * (2 * dp + vp + 2) + 2 * kBlock * kBlock;
  }
  BackwardTiles(float* base, std::int64_t keys, std::int64_t queries, const HeadShape& shape)
      : d(shape.head_dim), v_d(shape.dv()), dp(round_up(d, kLanes)), vp(round_up(v_d, kLanes)) {
    const auto take = [&](std::int64_t n) { return std::exchange(base, base + n); };
    k_t = take(keys * d), v_t = take(keys * v_d), p = take(kBlock * kBlock), ds = take(kBlock * kBlock);
    k = take(keys * dp), dk = take(keys * dp), dv = take(keys * vp);
    q = take(queries * dp), d_o = take(queries * vp), dq = take(queries * dp);
    lse = take(queries), d_rows = take(queries);
  }
};

/// A block of keys, packed from `key` on, against one of queries, packed from `query` on.
void backward_tile(const BackwardTiles& t, const Segment& queries, std::int64_t query, const Segment& keys,
                   std::int64_t key, const Scores& scores) {
  const std::int64_t d = t.d, v_d = t.v_d, dp = t.dp, vp = t.vp, width = round_up(keys.length, kLanes);
  const float *q = t.q + query * dp, *d_o = t.d_o + query * vp;
  gemm_small(queries.length, width, d, q, dp, 1, t.k_t + key * d, kBlock, t.p, kBlock, false);
  gemm_small(queries.length, width, v_d, d_o, vp, 1, t.v_t + key * v_d, kBlock, t.ds, kBlock, false);
  for (std::int64_t r = 0; r < queries.length; ++r) {
    const std::int64_t position = queries.position + r;
    const std::int64_t visible = std::clamp<std::int64_t>(position + 1 - keys.position, 0, keys.length),
                       hidden = std::clamp<std::int64_t>(scores.first_seen(position) - keys.position, 0, visible);
    float *p = t.p + r * kBlock, *ds = t.ds + r * kBlock;
    const float lse = t.lse[query + r], d_row = t.d_rows[query + r];
    if (scores.softcap > 0.0f) capped_probabilities_row(p, ds, hidden, visible, width, lse, d_row, scores.softcap);
    else probabilities_row(p, ds, hidden, visible, width, lse, d_row);
  }
  gemm_small(queries.length, dp, keys.length, t.ds, kBlock, 1, t.k + key * dp, dp, t.dq + query * dp, dp, true);
  gemm_small(keys.length, vp, queries.length, t.p, 1, kBlock, d_o, vp, t.dv + key * vp, vp, true);
  gemm_small(keys.length, dp, queries.length, t.ds, 1, kBlock, q, dp, t.dk + key * dp, dp, true);
}

struct BackwardOperands {
  ConstMatrix qkv, o, d_o;
  const float* lse;
  Matrix d_q, d_kv;
  Write write;
};

/// Rows [n][width] times `factor` become rows of d_q, or are added to them.
void put_queries(const float* from, std::int64_t width, const Segment& to, std::int64_t d, float factor, Matrix d_q,
                 std::int64_t column, Write write) {
  for (std::int64_t r = 0; r < to.length; ++r) {
    float* at = row<float>(d_q, to.row + r) + column;
    for (std::int64_t c = 0; c < d; ++c) {
      const float found = from[r * width + c] * factor;
      at[c] = write == Write::accumulate ? at[c] + found : found;
    }
  }
}

template <class E>
void run_backward(const Task& task, const BackwardTiles& t, const BackwardOperands& x, const Keys& keys) {
  const HeadShape& shape = keys.shape;
  const std::int64_t d = t.d, v_d = t.v_d, dp = t.dp, vp = t.vp, group = shape.num_heads / shape.num_kv_heads;
  const auto queries = chunks_of(keys.share.ranks, keys.share.place, task.begin, task.end);
  const std::vector<Segment> segments = keys.segments(task);
  const std::int64_t length = queries[0].length, room = round_up(length, kBlock);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * room;
    const E *key = keys.key<E>(segments[i], task.kv_head), *value = keys.value<E>(segments[i], task.kv_head);
    pack_transposed(key, keys.kv.ld, length, d, t.k_t + at * d);
    pack_transposed(value, keys.kv.ld, length, v_d, t.v_t + at * v_d);
    pack_rows(key, keys.kv.ld, length, d, 1.0f, t.k + at * dp, dp);
  }
  const auto all = static_cast<std::int64_t>(segments.size()) * room;
  std::fill_n(t.dk, all * dp, 0.0f);
  std::fill_n(t.dv, all * vp, 0.0f);
  for (std::int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
    std::fill_n(t.dq, 2 * room * dp, 0.0f);
    for (std::size_t c = 0; c < queries.size(); ++c) {
      const std::int64_t at = static_cast<std::int64_t>(c) * room, first = queries[c].row;
      const E *d_o = row<E>(x.d_o, first) + head * v_d, *o = row<E>(x.o, first) + head * v_d;
      pack_rows(row<E>(x.qkv, first) + head * d, x.qkv.ld, length, d, keys.scores.scale, t.q + at * dp, dp);
      pack_rows(d_o, x.d_o.ld, length, v_d, 1.0f, t.d_o + at * vp, vp);
      for (std::int64_t r = 0; r < length; ++r) {
        t.d_rows[at + r] = dot(d_o + r * x.d_o.ld, o + r * x.o.ld, v_d);
        t.lse[at + r] = x.lse[(first + r) * shape.num_heads + head];
      }
    }
    for (std::size_t s = 0; s < segments.size(); ++s)
      for (std::int64_t j = 0; j < blocks_of(segments[s]); ++j)
        for (std::size_t c = 0; c < queries.size(); ++c)
          for (std::int64_t i = 0; i < blocks_of(queries[c]); ++i) {
            const Segment of_queries = block_of(queries[c], i), of_keys = block_of(segments[s], j);
            if (meets(keys.scores, of_queries, of_keys))
              backward_tile(t, of_queries, static_cast<std::int64_t>(c) * room + i * kBlock, of_keys,
                            static_cast<std::int64_t>(s) * room + j * kBlock, keys.scores);
          }
    for (std::size_t c = 0; c < queries.size(); ++c)
      put_queries(t.dq + static_cast<std::int64_t>(c) * room * dp, dp, queries[c], d, keys.scores.scale, x.d_q,
                  head * d, x.write);
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * room;
    float* to = row<float>(x.d_kv, segments[i].row);
    unpack_rows(t.dk + at * dp, dp, length, d, 1.0f, to + task.kv_head * d, x.d_kv.ld);
    unpack_rows(t.dv + at * vp, vp, length, v_d, 1.0f, to + shape.num_kv_heads * d + task.kv_head * v_d, x.d_kv.ld);
  }
}

}  // namespace

void context_attention_forward(KernelContext& ctx, ConstMatrix qkv, ConstMatrix kv, HeadShape shape,
                               std::span<const std::int32_t> cu_seqlens, const ContextShare& share, Scores scores,
                               Matrix o, float* lse, Write write) {
  HB_CHECK(qkv.dtype == kv.dtype, "context_attention: {} and {}", name_of(qkv.dtype), name_of(kv.dtype));
  HB_CHECK(scores.scale > 0.0f, "scale {}", scores.scale);
  const Tasks work = make_tasks(shape, cu_seqlens, 2);
  const std::int64_t d = shape.head_dim, dp = round_up(shape.dv(), kLanes);
  const std::int64_t packed = 2 * share.parts() * round_up(work.longest, kBlock);
  const std::int64_t floats = round_up(AttentionTile::floats(packed, d, dp), 1024);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kContextScratch, static_cast<std::size_t>(floats * ctx.num_threads()) * 4));
  const Keys keys{kv, shape, share, scores};
  with_float_type(qkv.dtype, [&](auto tag) {
    with_float_type(o.dtype, [&](auto out) {
      parallel_tasks(ctx, std::ssize(work.tasks), work.worth_team, [&](std::int64_t i, int thread) {
        const AttentionTile tiles(scratch + thread * floats, packed, d, dp);
        run_forward<decltype(tag), decltype(out)>(work.tasks[static_cast<std::size_t>(i)], tiles, qkv, keys, o, lse,
                                                  write);
      });
    });
  });
}

void context_attention_backward(KernelContext& ctx, ConstMatrix qkv, ConstMatrix kv, ConstMatrix o, ConstMatrix d_o,
                                const float* lse, HeadShape shape, std::span<const std::int32_t> cu_seqlens,
                                const ContextShare& share, Scores scores, Matrix d_q, Write write, Matrix d_kv) {
  HB_CHECK(qkv.dtype == kv.dtype && qkv.dtype == o.dtype && qkv.dtype == d_o.dtype && d_q.dtype == DType::f32 &&
               d_kv.dtype == DType::f32,
           "context_attention_backward: mixed dtypes");
  const Tasks work = make_tasks(shape, cu_seqlens, 1);
  const std::int64_t room = round_up(work.longest, kBlock), keys_here = 2 * share.parts() * room;
  const std::int64_t floats = round_up(BackwardTiles::floats(keys_here, 2 * room, shape), 1024);
  auto* scratch =
      static_cast<float*>(ctx.scratch(kContextScratch, static_cast<std::size_t>(floats * ctx.num_threads()) * 4));
  const BackwardOperands operands{qkv, o, d_o, lse, d_q, d_kv, write};
  const Keys keys{kv, shape, share, scores};
  with_float_type(qkv.dtype, [&](auto tag) {
    parallel_tasks(ctx, std::ssize(work.tasks), work.worth_team, [&](std::int64_t i, int thread) {
      const BackwardTiles tiles(scratch + thread * floats, keys_here, 2 * room, shape);
      run_backward<decltype(tag)>(work.tasks[static_cast<std::size_t>(i)], tiles, operands, keys);
    });
  });
}

}  // namespace hotbunk::kernels
