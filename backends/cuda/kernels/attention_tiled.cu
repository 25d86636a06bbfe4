// Causal attention in bf16, variant 2: tiles of 64 queries by 64 keys on mma.sync, softmax as the keys come
// (Dao, FlashAttention-2, arXiv 2307.08691). Training, prefill and decode over a paged pool; backward for training.
//
// The rows of a tile are *items*: a row of the sequence and one of the query heads that share a key-value head, item =
// row * group + head. So keys and values come to shared memory once for all heads that read them, and a decode step, of
// one row, fills a tile with its heads.
//
// Promise P5: an item's bits depend on its own query and on its sequence's keys, and on nothing else that is in the
// launch. Tiles of keys begin at the sequence's first one; each row of an mma is a sum of its own; a key that an item
// does not see adds an exact 0 (its p is 0, and rows that are not there are zeros), so it is the same whether it is
// masked, beyond the end, or in a tile that the warp leaves out. Training and decode therefore agree to the bit.
//
// Numbers: scores and sums in fp32; p and ds are rounded to bf16 for their products, as the operands of an mma are.
// d and v: multiples of 8, at most D; columns beyond are zeros in shared memory. 128 threads; a warp has 16 items or keys.
#include "held_keys.cuh"
#include "mma.cuh"

namespace {

constexpr int tile = 64;
constexpr float log2_e = 1.4426950408889634f;

/// The tile of this block: block x counts tiles of `each` items, sequence by sequence. False: beyond the last one.
HB_DEVICE bool tile_here(const int32_t* cu_seqlens, int S, int group, int each, int& sequence, int& first) {
  const auto items = [&](int s) { return (cu_seqlens[s + 1] - cu_seqlens[s]) * group; };
  sequence = segment_of_tile(int(blockIdx.x), S, each, items, first);
  return sequence >= 0;
}

/// Brings `count` rows of d elements to shared memory; row(r): where row r lies, null for zeros. `any`: an address.
template <int D, class Row>
HB_DEVICE void fetch(bf16 (*to)[D + 8], int count, int d, const bf16* any, Row row) {
  constexpr int chunks = D / 8;
  for (int at = threadIdx.x; at < count * chunks; at += blockDim.x) {
    const int r = at / chunks, c = at % chunks * 8;
    const bf16* from = row(r);
    const bool here = from != nullptr && c < d;
    copy_async(&to[r][c], here ? from + c : any, here ? 16 : 0);
  }
}

/// The 16 rows from `row` on as operands a of D / 16 products.
template <int D>
HB_DEVICE void take_rows(uint32_t (&a)[D / 16][4], const bf16 (*from)[D + 8], int row) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) load_matrix(a[k], &from[row + lane % 16][16 * k + lane / 16 * 8]);
}

/// c[16, 8 n] += a[16, D] times the rows from `row` on, transposed.
template <int D, int n>
HB_DEVICE void times_rows(float (&c)[n][4], const uint32_t (&a)[D / 16][4], const bf16 (*rows)[D + 8], int row) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      uint32_t b[4];
      load_matrix(b, &rows[row + 16 * j + lane % 8 + lane / 16 * 8][16 * k + lane / 8 % 2 * 8]);
      multiply(c[2 * j], a[k], b[0], b[1]);
      multiply(c[2 * j + 1], a[k], b[2], b[3]);
    }
}

/// c[16, D] += p[16, 8 n], rounded to bf16, times the 8 n rows from `row` on.
template <int D, int n>
HB_DEVICE void add_rows(float (&c)[D / 8][4], const float (&p)[n][4], const bf16 (*rows)[D + 8], int row) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < n / 2; ++k) {
    const uint32_t a[4] = {packed(p[2 * k][0], p[2 * k][1]), packed(p[2 * k][2], p[2 * k][3]),
                           packed(p[2 * k + 1][0], p[2 * k + 1][1]), packed(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t b[4];
      load_matrix_transposed(b, &rows[row + 16 * k + lane % 16][16 * j + lane / 16 * 8]);
      multiply(c[2 * j], a, b[0], b[1]);
      multiply(c[2 * j + 1], a, b[2], b[3]);
    }
  }
}

/// Rows of 16 x D sums, times a factor for each of a lane's two rows, to memory by way of shared memory, 16 bytes a
/// lane. to(r): where row r of the warp's 16 goes, null for nowhere. `room`: of this warp.
template <int D, class To>
HB_DEVICE void give_rows(bf16 (*room)[D + 8], const float (&c)[D / 8][4], const float (&factor)[2], int d, To to) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < D / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      *reinterpret_cast<uint32_t*>(&room[lane / 4 + 8 * e][8 * j + lane % 4 * 2]) =
          packed(c[j][2 * e] * factor[e], c[j][2 * e + 1] * factor[e]);
  __syncwarp();
  for (int at = lane; at < 16 * (d / 8); at += 32) {
    const int r = at / (d / 8), column = at % (d / 8) * 8;
    bf16* row = to(r);
    if (row != nullptr) *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(&room[r][column]);
  }
}

/// Over the four lanes that share rows of an mma's result.
HB_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
HB_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

using hotbunk::ScoreOptions;

struct Heads : hotbunk::AttentionHeads {
  HB_DEVICE Heads(const hotbunk::AttentionHeads& h) : hotbunk::AttentionHeads(h) {}
  HB_DEVICE int width() const { return a * d + k * (d + v); }
  HB_DEVICE int group() const { return a / k; }
  /// Where in a row key-value head i has its key and its value.
  HB_DEVICE int key(int i) const { return (a + i) * d; }
  HB_DEVICE int value(int i) const { return (a + k) * d + i * v; }
};

/// Items [first, first + tile) of a sequence of `items`; item i sees before + i / group + 1 positions, or the last
/// `window` of them, and of these the keys that are here.
struct Items {
  int first, items, group, before, window;
  HeldKeys here{};
  HB_DEVICE int positions(int i) const { return i < items ? max(0, before + i / group + 1) : 0; }
  HB_DEVICE int seen(int i) const { return here.of(positions(i)); }
  HB_DEVICE int first_seen(int i) const { return window > 0 ? here.of(positions(i) - window) : 0; }
  /// By any of so many items from i on.
  HB_DEVICE int most_seen(int i, int count) const { return i < items ? seen(min(i + count, items) - 1) : 0; }
};

/// Products of queries and keys as softmax takes them where they are capped: in units of what they are then scaled by,
/// `scale_after`.
template <int n>
HB_DEVICE void cap(float (&p)[n][4], const ScoreOptions& s) {
  if (s.softcap <= 0.0f) return;
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) p[j][e] = s.softcap * tanhf(p[j][e] * s.scale / s.softcap);
}
HB_DEVICE float scale_after(const ScoreOptions& s) { return s.softcap > 0.0f ? 1.0f : s.scale; }

/// query(i), out(i): of item i; key(s), value(s): of key s; lse(i, x): takes log sum e^score, -inf of no key.
template <int D, class Query, class Key, class Value, class Out, class Lse>
HB_DEVICE void attend(const Items& here, const Heads& h, const ScoreOptions& scores, const bf16* any, Query query,
                      Key key, Value value, Out out, Lse lse) {
  __shared__ __align__(16) bf16 ks[tile][D + 8], vs[tile][D + 8];
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, first = here.first + row;
  fetch<D>(ks, tile, h.d, any, [&](int r) { return here.first + r < here.items ? query(here.first + r) : nullptr; });
  commit();
  wait_for_copies<0>();
  __syncthreads();
  uint32_t q[D / 16][4];
  take_rows<D>(q, ks, row);
  const int keys = here.most_seen(here.first, tile), warp_keys = here.most_seen(first, 16);
  const int seen[2] = {here.seen(first + lane / 4), here.seen(first + lane / 4 + 8)};
  const int from[2] = {here.first_seen(first + lane / 4), here.first_seen(first + lane / 4 + 8)};
  const float scale = scale_after(scores), unit = scale * log2_e;
  float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int k0 = here.first_seen(here.first) / tile * tile; k0 < keys; k0 += tile) {
    __syncthreads();  // all have read what was here
    fetch<D>(ks, tile, h.d, any, [&](int r) { return k0 + r < keys ? key(k0 + r) : nullptr; });
    commit();
    fetch<D>(vs, tile, h.v, any, [&](int r) { return k0 + r < keys ? value(k0 + r) : nullptr; });
    commit();
    wait_for_copies<1>();
    __syncthreads();
    float p[8][4] = {};
    if (k0 < warp_keys) {
      times_rows<D, 8>(p, q, ks, 0);
      cap(p, scores);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float high = -INFINITY;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = p[j][2 * e + c];
            const int key = k0 + 8 * j + lane % 4 * 2 + c;
            if (key >= seen[e] || key < from[e]) x = -INFINITY;
            high = fmaxf(high, x);
          }
        const float next = fmaxf(most[e], quad_max(high)), base = next == -INFINITY ? 0.0f : next;
        const float shrink = exp2f((most[e] - base) * unit);
        most[e] = next;
        // Not left to the compiler, which may contract one kernel's sum and not another's: lse, too, is of one make.
        sum[e] = __fmul_rn(sum[e], shrink);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = p[j][2 * e + c];
            x = exp2f((x - base) * unit);
            sum[e] = __fadd_rn(sum[e], x);
          }
#pragma unroll
        for (int j = 0; j < D / 8; ++j) o[j][2 * e] *= shrink, o[j][2 * e + 1] *= shrink;
      }
    }
    wait_for_copies<0>();
    __syncthreads();
    if (k0 < warp_keys) add_rows<D, 8>(o, p, vs, 0);
  }
  float factor[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float total = quad_sum(sum[e]);
    const bool any = seen[e] > from[e];
    factor[e] = any ? 1.0f / total : 0.0f;
    const int i = first + lane / 4 + 8 * e;
    if (lane % 4 == 0 && i < here.items) lse(i, any ? fmaf(most[e], scale, logf(total)) : -INFINITY);
  }
  __syncthreads();
  give_rows<D>(&ks[row], o, factor, h.v, [&](int r) { return first + r < here.items ? out(first + r) : nullptr; });
}

template <int D>
HB_DEVICE void attention(const bf16* x, const int32_t* cu_seqlens, bf16* o, float* lse, int S, const Heads& h,
                         const ScoreOptions& scores) {
  int s, first;
  const int group = h.group(), kv = blockIdx.y, w = h.width();
  if (!tile_here(cu_seqlens, S, group, tile, s, first)) return;
  const int begin = cu_seqlens[s];
  const Items here{first, (cu_seqlens[s + 1] - begin) * group, group, 0, scores.window};
  const bf16* rows = x + size_t(begin) * w;
  const auto at = [&](int i) { return size_t(begin + i / group) * h.a + kv * group + i % group; };
  attend<D>(
      here, h, scores, x, [&](int i) { return rows + size_t(i / group) * w + (kv * group + i % group) * h.d; },
      [&](int i) { return rows + size_t(i) * w + h.key(kv); },
      [&](int i) { return rows + size_t(i) * w + h.value(kv); }, [&](int i) { return o + at(i) * h.v; },
      [&](int i, float y) { lse[at(i)] = y; });
}

/// Rows of sequence s are the last of its lengths[s] keys, of which the pool holds `held`, a block after another: keys
/// [k][block_tokens][d], then values [k][block_tokens][v]. width: from a row of x, which begins with its queries, to the
/// next. lse: null, or as attention's.
template <int D>
HB_DEVICE void paged_attention(const bf16* x, int width, const bf16* pool, const int32_t* cu_seqlens, const int32_t* tables,
                               const int32_t* lengths, bf16* o, float* lse, int S, const Heads& h, int block_tokens,
                               int max_blocks, const ScoreOptions& scores, const HeldKeys& held) {
  int s, first;
  const int group = h.group(), kv = blockIdx.y, of_keys = h.k * h.d, of_values = h.k * h.v;
  if (!tile_here(cu_seqlens, S, group, tile, s, first)) return;
  const int begin = cu_seqlens[s], rows = cu_seqlens[s + 1] - begin;
  const Items here{first, rows * group, group, lengths[s] - rows, scores.window, held};
  const int32_t* table = tables + size_t(s) * max_blocks;
  const auto block = [&](int i) { return pool + size_t(table[i / block_tokens]) * block_tokens * (of_keys + of_values); };
  const auto at = [&](int i) { return size_t(begin + i / group) * h.a + kv * group + i % group; };
  attend<D>(
      here, h, scores, x,
      [&](int i) { return x + size_t(begin + i / group) * width + (kv * group + i % group) * h.d; },
      [&](int i) { return block(i) + (size_t(kv) * block_tokens + i % block_tokens) * h.d; },
      [&](int i) {
        return block(i) + size_t(block_tokens) * of_keys + (size_t(kv) * block_tokens + i % block_tokens) * h.v;
      },
      [&](int i) { return o + at(i) * h.v; },
      [&](int i, float y) {
        if (lse != nullptr) lse[at(i)] = y;
      });
}

/// What backward reads and writes.
struct Backward {
  const bf16 *d_o, *x, *o;
  const float* lse;
  const int32_t* cu_seqlens;
  bf16* dx;
  float* delta;
  int S;
  Heads h;
  ScoreOptions scores;
};

/// p = e^(score - lse) and, from dp, ds = p (dp - delta) without the scale, of 8 n columns of two rows or the other way
/// round. `of`: {lse in units of log2, delta} of element (j, e); seen(j, e): whether there is such a pair.
template <int n, class Of, class Seen>
HB_DEVICE void probabilities(float (&p)[n][4], float (&ds)[n][4], const ScoreOptions& scores, Of of, Seen seen) {
  const float unit = scale_after(scores) * log2_e;
  cap(p, scores);
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 y = of(j, e);
      const float capped = scores.softcap > 0.0f ? p[j][e] / scores.softcap : 0.0f;
      p[j][e] = seen(j, e) ? exp2f(p[j][e] * unit - y.x) : 0.0f;
      ds[j][e] = p[j][e] * (ds[j][e] - y.y) * (1.0f - capped * capped);
    }
}

/// dq of a tile of items; delta[t, head] = sum do o is left for the keys' side.
template <int D>
HB_DEVICE void query_backward(const Backward& b) {
  __shared__ __align__(16) bf16 ks[tile][D + 8], vs[tile][D + 8];
  __shared__ float deltas[tile];
  int s, first_item;
  const Heads h = b.h;
  const int group = h.group(), kv = blockIdx.y, w = h.width(), d = h.d, v = h.v;
  if (!tile_here(b.cu_seqlens, b.S, group, tile, s, first_item)) return;
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, begin = b.cu_seqlens[s];
  const Items here{first_item, (b.cu_seqlens[s + 1] - begin) * group, group, 0, b.scores.window};
  const int first = first_item + row, items = here.items;
  const auto at = [&](int i) { return size_t(begin + i / group) * h.a + kv * group + i % group; };
  const auto query = [&](int i) { return size_t(begin + i / group) * w + (kv * group + i % group) * d; };
  const auto item = [&](int r) { return first_item + r < items ? first_item + r : -1; };
  fetch<D>(ks, tile, d, b.x, [&](int r) { return item(r) >= 0 ? b.x + query(item(r)) : nullptr; });
  fetch<D>(vs, tile, v, b.x, [&](int r) { return item(r) >= 0 ? b.d_o + at(item(r)) * v : nullptr; });
  commit();
  wait_for_copies<0>();
  __syncthreads();
  uint32_t q[D / 16][4], g[D / 16][4];
  take_rows<D>(q, ks, row);
  take_rows<D>(g, vs, row);
  for (int r = 0; r < 16; ++r) {
    const int i = first + r;
    float own = 0;
    if (i < items)
      for (int j = lane; j < v; j += 32) own += load(&vs[row + r][j]) * load(b.o + at(i) * v + j);
    own = warp_sum(own);
    if (lane == 0) {
      deltas[row + r] = own;
      if (i < items) b.delta[at(i)] = own;
    }
  }
  __syncwarp();
  float2 of[2];
  int seen[2], from[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = first + lane / 4 + 8 * e;
    seen[e] = here.seen(i), from[e] = here.first_seen(i);
    of[e] = {i < items ? b.lse[at(i)] * log2_e : 0.0f, deltas[row + lane / 4 + 8 * e]};
  }
  const int keys = here.most_seen(first_item, tile), warp_keys = here.most_seen(first, 16);
  const bf16* rows = b.x + size_t(begin) * w;
  float dq[D / 8][4] = {};
  for (int k0 = here.first_seen(first_item) / tile * tile; k0 < keys; k0 += tile) {
    __syncthreads();
    fetch<D>(ks, tile, d, b.x, [&](int r) { return k0 + r < keys ? rows + size_t(k0 + r) * w + h.key(kv) : nullptr; });
    fetch<D>(vs, tile, v, b.x, [&](int r) { return k0 + r < keys ? rows + size_t(k0 + r) * w + h.value(kv) : nullptr; });
    commit();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int half = 0; half < tile; half += 32) {
      if (k0 + half >= warp_keys) break;
      float p[4][4] = {}, ds[4][4] = {};
      times_rows<D, 4>(p, q, ks, half);
      times_rows<D, 4>(ds, g, vs, half);
      probabilities<4>(
          p, ds, b.scores, [&](int, int e) { return of[e / 2]; },
          [&](int j, int e) {
            const int key = k0 + half + 8 * j + lane % 4 * 2 + e % 2;
            return key < seen[e / 2] && key >= from[e / 2];
          });
      add_rows<D, 4>(dq, ds, ks, half);
    }
  }
  __syncthreads();
  const float factor[2] = {b.scores.scale, b.scores.scale};
  give_rows<D>(&ks[row], dq, factor, d, [&](int r) { return first + r < items ? b.dx + query(first + r) : nullptr; });
}

/// dk and dv of a tile of keys of one key-value head, over the items that see them, in order.
template <int D>
HB_DEVICE void key_backward(const Backward& b) {
  constexpr int each = D > 64 ? 16 : 32;  // items at a time: what 48 KB of shared memory leave
  __shared__ __align__(16) bf16 ks[tile][D + 8], vs[tile][D + 8], qs[each][D + 8], gs[each][D + 8];
  __shared__ float2 numbers[each];
  int s, first_key;
  const Heads h = b.h;
  const int group = h.group(), kv = blockIdx.y, w = h.width(), d = h.d, v = h.v;
  if (!tile_here(b.cu_seqlens, b.S, 1, tile, s, first_key)) return;
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, begin = b.cu_seqlens[s];
  const int length = b.cu_seqlens[s + 1] - begin, window = b.scores.window;
  // Those that see the last key of the tile are the last that see one of it.
  const int items = (window > 0 ? min(length, first_key + tile - 1 + window) : length) * group;
  const auto at = [&](int i) { return size_t(begin + i / group) * h.a + kv * group + i % group; };
  const auto of_row = [&](int r, int column) { return size_t(begin + first_key + r) * w + column; };
  fetch<D>(ks, tile, d, b.x, [&](int r) { return first_key + r < length ? b.x + of_row(r, h.key(kv)) : nullptr; });
  fetch<D>(vs, tile, v, b.x, [&](int r) { return first_key + r < length ? b.x + of_row(r, h.value(kv)) : nullptr; });
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  for (int i0 = first_key * group; i0 < items; i0 += each) {
    __syncthreads();
    const auto query = [&](int i) { return size_t(begin + i / group) * w + (kv * group + i % group) * d; };
    fetch<D>(qs, each, d, b.x, [&](int r) { return i0 + r < items ? b.x + query(i0 + r) : nullptr; });
    fetch<D>(gs, each, v, b.x, [&](int r) { return i0 + r < items ? b.d_o + at(i0 + r) * v : nullptr; });
    commit();
    if (threadIdx.x < each) {
      const int i = i0 + threadIdx.x;
      numbers[threadIdx.x] = i < items ? float2{b.lse[at(i)] * log2_e, b.delta[at(i)]} : float2{0.0f, 0.0f};
    }
    wait_for_copies<0>();
    __syncthreads();
    float p[each / 8][4] = {}, ds[each / 8][4] = {};  // [key][item]
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4], v[4];
      load_matrix(a, &ks[row + lane % 16][16 * k + lane / 16 * 8]);
      load_matrix(v, &vs[row + lane % 16][16 * k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < each / 16; ++j) {
        uint32_t q[4], g[4];
        const int r = 16 * j + lane % 8 + lane / 16 * 8, c = 16 * k + lane / 8 % 2 * 8;
        load_matrix(q, &qs[r][c]);
        multiply(p[2 * j], a, q[0], q[1]);
        multiply(p[2 * j + 1], a, q[2], q[3]);
        load_matrix(g, &gs[r][c]);
        multiply(ds[2 * j], v, g[0], g[1]);
        multiply(ds[2 * j + 1], v, g[2], g[3]);
      }
    }
    probabilities<each / 8>(
        p, ds, b.scores, [&](int j, int e) { return numbers[8 * j + lane % 4 * 2 + e % 2]; },
        [&](int j, int e) {
          const int i = i0 + 8 * j + lane % 4 * 2 + e % 2, back = i / group - (first_key + row + lane / 4 + e / 2 * 8);
          return i < items && back >= 0 && (window == 0 || back < window);
        });
    add_rows<D, each / 8>(dv, p, gs, 0);
    add_rows<D, each / 8>(dk, ds, qs, 0);
  }
  __syncthreads();
  const float whole[2] = {1.0f, 1.0f}, factor[2] = {b.scores.scale, b.scores.scale};
  const auto out = [&](int column) {
    return [&, column](int r) { return first_key + row + r < length ? b.dx + of_row(row + r, column) : nullptr; };
  };
  give_rows<D>(&ks[row], dk, factor, d, out(h.key(kv)));
  give_rows<D>(&vs[row], dv, whole, v, out(h.value(kv)));
}

}  // namespace

/// Grids: x a bound of tiles, ceil(T a / k / 64) + S, and of keys ceil(T / 64) + S; y key-value heads.
#define HB_ATTENTION_TILED(D)                                                                                            \
  extern "C" __global__ void __launch_bounds__(128)                                                                      \
      tiled_attention_##D(const bf16* x, const int32_t* cu_seqlens, bf16* o, float* lse, int S,                          \
                          hotbunk::AttentionHeads heads, ScoreOptions scores) {                                          \
    attention<D>(x, cu_seqlens, o, lse, S, heads, scores);                                                               \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128)                                                                      \
      tiled_paged_attention_##D(const bf16* x, int width, const bf16* pool, const int32_t* cu_seqlens,                   \
                                const int32_t* tables, const int32_t* lengths, bf16* o, float* lse, int S,               \
                                hotbunk::AttentionHeads heads, int block_tokens, int max_blocks,                         \
                                ScoreOptions scores, hotbunk::KeyShare keys) {                                           \
    paged_attention<D>(x, width, pool, cu_seqlens, tables, lengths, o, lse, S, heads, block_tokens, max_blocks, scores,  \
                       keys);                                                                                            \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128)                                                                      \
      tiled_attention_query_backward_##D(const bf16* d_o, const bf16* x, const bf16* o, const float* lse,                \
                                         const int32_t* cu_seqlens, bf16* dx, float* delta, int S,                       \
                                         hotbunk::AttentionHeads heads, ScoreOptions scores) {                           \
    query_backward<D>({d_o, x, o, lse, cu_seqlens, dx, delta, S, heads, scores});                                        \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128)                                                                      \
      tiled_attention_key_backward_##D(const bf16* d_o, const bf16* x, const float* lse, float* delta,                   \
                                       const int32_t* cu_seqlens, bf16* dx, int S, hotbunk::AttentionHeads heads,        \
                                       ScoreOptions scores) {                                                            \
    key_backward<D>({d_o, x, nullptr, lse, cu_seqlens, dx, delta, S, heads, scores});                                    \
  }
HB_ATTENTION_TILED(64)
HB_ATTENTION_TILED(128)
