// Causal attention of packed sequences, its backward, and attention over a paged KV pool. Variant 1: a warp per row
// and head, no tiles (attention_rows.cuh). It is the oracle of variant 2 (attention_tiled.cu) and what computes fp32, which
// tensor cores have no product for: slow, but its order is the same whatever else is in the batch, and the same for
// training, prefill and decode: keys in ascending order, one after another.
#include "attention_rows.cuh"

namespace {

template <class E>
HB_DEVICE void attention(const E* x, const int32_t* cu_seqlens, E* o, float* lse, int T, int S, const Heads& h,
                         const ScoreOptions& scores) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int begin = cu_seqlens[sequence_of(cu_seqlens, S, it.row)], w = h.width(), kv = it.head / h.group();
  float q[held];
  take(q, x + size_t(it.row) * w + it.head * h.d, h.d);
  const E *keys = x + size_t(begin) * w + h.key(kv), *values = x + size_t(begin) * w + h.value(kv);
  const int position = it.row - begin;
  Attended found;
  found.add(
      q, first_seen(scores, position), position + 1, h.d, h.v, scores, [&](int s) { return keys + size_t(s) * w; },
      [&](int s) { return values + size_t(s) * w; });
  const float log_sum = found.finish();
  give(o + (size_t(it.row) * h.a + it.head) * h.v, found.o, h.v);
  if ((threadIdx.x & 31) == 0) lse[size_t(it.row) * h.a + it.head] = log_sum;
}

/// dq of one row and head; delta[t, head] = sum do o is left for the keys' side.
template <class E>
HB_DEVICE void query_backward(const E* d_o, const E* x, const E* o, const float* lse, const int32_t* cu_seqlens, E* dx,
                              float* delta, int T, int S, const Heads& h, const ScoreOptions& scores) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int begin = cu_seqlens[sequence_of(cu_seqlens, S, it.row)], w = h.width(), kv = it.head / h.group();
  const size_t at = size_t(it.row) * h.a + it.head;
  float q[held], g[held], out[held], dq[held] = {};
  take(q, x + size_t(it.row) * w + it.head * h.d, h.d);
  take(g, d_o + at * h.v, h.v);
  take(out, o + at * h.v, h.v);
  const float own = dot(g, out);
  if ((threadIdx.x & 31) == 0) delta[at] = own;
  for (int s = begin + first_seen(scores, it.row - begin); s <= it.row; ++s) {
    float k[held], v[held];
    take(k, x + size_t(s) * w + h.key(kv), h.d);
    take(v, x + size_t(s) * w + h.value(kv), h.v);
    const float score = score_of(scores, dot(q, k)), p = expf(score - lse[at]);
    add_scaled(dq, p * (dot(g, v) - own) * slope(scores, score) * scores.scale, k);
  }
  give(dx + size_t(it.row) * w + it.head * h.d, dq, h.d);
}

/// dk and dv of one row and key-value head: over its query heads, and over the later rows of its sequence that see it, in
/// order.
template <class E>
HB_DEVICE void key_backward(const E* d_o, const E* x, const float* lse, const float* delta, const int32_t* cu_seqlens,
                            E* dx, int T, int S, const Heads& h, const ScoreOptions& scores) {
  const Item it = item(T, h.k);
  if (!it.here) return;
  const int w = h.width(), group = h.group(), last = cu_seqlens[sequence_of(cu_seqlens, S, it.row) + 1];
  const int end = scores.window > 0 ? min(last, it.row + scores.window) : last;
  float k[held], v[held], dk[held] = {}, dv[held] = {};
  take(k, x + size_t(it.row) * w + h.key(it.head), h.d);
  take(v, x + size_t(it.row) * w + h.value(it.head), h.v);
  for (int head = it.head * group; head < (it.head + 1) * group; ++head)
    for (int t = it.row; t < end; ++t) {
      const size_t at = size_t(t) * h.a + head;
      float q[held], g[held];
      take(q, x + size_t(t) * w + head * h.d, h.d);
      take(g, d_o + at * h.v, h.v);
      const float score = score_of(scores, dot(q, k)), p = expf(score - lse[at]);
      add_scaled(dv, p, g);
      add_scaled(dk, p * (dot(g, v) - delta[at]) * slope(scores, score) * scores.scale, q);
    }
  give(dx + size_t(it.row) * w + h.key(it.head), dk, h.d);
  give(dx + size_t(it.row) * w + h.value(it.head), dv, h.v);
}

/// The KV pool of one layer, a block after another: first a block's keys, [k][block_tokens][d], then its values,
/// [k][block_tokens][v].
template <class E>
HB_DEVICE void kv_write(const E* x, const int32_t* slots, E* pool, const Heads& h, int block_tokens,
                        const HeldKeys& here) {
  const int t = blockIdx.x, slot = here.slot(slots[t], block_tokens), of_keys = h.k * h.d, of_values = h.k * h.v;
  if (slot < 0) return;
  const E* from = x + size_t(t) * h.width() + h.key(0);
  E* block = pool + size_t(slot / block_tokens) * block_tokens * h.of_keys();
  E* values = block + size_t(block_tokens) * of_keys;
  const auto row = [&](int head) { return size_t(head) * block_tokens + slot % block_tokens; };
  for (int j = threadIdx.x; j < of_keys; j += blockDim.x) block[row(j / h.d) * h.d + j % h.d] = from[j];
  for (int j = threadIdx.x; j < of_values; j += blockDim.x) values[row(j / h.v) * h.v + j % h.v] = from[of_keys + j];
}

/// Row t is one of the last cu_seqlens[s + 1] - cu_seqlens[s] of sequence s, of whose lengths[s] keys the pool holds
/// those that are here; rows of other sequences than these S are left alone. width: from a row of x, which begins with
/// its queries, to the next. lse: null, or as attention's.
template <class E>
HB_DEVICE void paged_attention(const E* x, int width, const E* pool, const int32_t* cu_seqlens, const int32_t* tables,
                               const int32_t* lengths, E* o, float* lse, int T, int S, const Heads& h, int block_tokens,
                               int max_blocks, const ScoreOptions& scores, const HeldKeys& here) {
  const Item it = item(T, h.a);
  if (!it.here || it.row < cu_seqlens[0] || it.row >= cu_seqlens[S]) return;
  const int s = sequence_of(cu_seqlens, S, it.row), kv = it.head / h.group();
  const int n = lengths[s] == 0 ? 0 : lengths[s] - (cu_seqlens[s + 1] - 1 - it.row);
  const int32_t* table = tables + size_t(s) * max_blocks;
  const auto block = [&](int i) { return pool + size_t(table[i / block_tokens]) * block_tokens * h.of_keys(); };
  float q[held];
  take(q, x + size_t(it.row) * width + it.head * h.d, h.d);
  Attended found;
  found.add(
      q, here.of(first_seen(scores, n - 1)), here.of(n), h.d, h.v, scores,
      [&](int i) { return block(i) + (size_t(kv) * block_tokens + i % block_tokens) * h.d; },
      [&](int i) {
        return block(i) + size_t(block_tokens) * h.k * h.d + (size_t(kv) * block_tokens + i % block_tokens) * h.v;
      });
  const float log_sum = found.finish();
  const size_t at = size_t(it.row) * h.a + it.head;
  give(o + at * h.v, found.o, h.v);
  if (lse != nullptr && (threadIdx.x & 31) == 0) lse[at] = log_sum;
}

/// Rows of o [T, width], and of lse [T, heads] or null, behind the last of the sequences: nobody's, so zeros and -inf.
template <class E>
HB_DEVICE void clear_idle_rows(E* o, float* lse, const int32_t* cu_seqlens, int S, int width, int heads) {
  const size_t row = blockIdx.x;
  if (int(row) < cu_seqlens[S]) return;
  for (int j = threadIdx.x; j < width; j += blockDim.x) store(o + row * width + j, 0.0f);
  for (int j = threadIdx.x; j < heads && lse != nullptr; j += blockDim.x) lse[row * heads + j] = -INFINITY;
}

}  // namespace

/// Of S packed sequences, lengths [S] and what a row, its outputs and its heads begin at, counted in their elements,
/// [S + 1] each, one list behind the other: for a library that finds sequences by offsets. One that is longer than the
/// host could know ends the launch: the library was told of `longest`, and would leave out the rest. Threads: S + 1.
extern "C" __global__ void attention_lengths(const int32_t* cu_seqlens, int32_t* out, int S,
                                             hotbunk::AttentionHeads heads, int longest) {
  const int s = blockIdx.x * blockDim.x + threadIdx.x;
  if (s > S) return;
  const int begin = cu_seqlens[s];
  out[S + s] = begin * Heads(heads).width();
  out[2 * S + 1 + s] = begin * heads.a * heads.v;
  out[3 * S + 2 + s] = begin * heads.a;
  if (s == S) return;
  const int length = cu_seqlens[s + 1] - begin;
  if (length > longest) __trap();
  out[s] = length;
}

/// Grids of attention, query_backward and paged_attention: T a warps; key_backward: T k warps; kv_write and
/// clear_idle_rows: T blocks.
#define HB_ATTENTION(E, name)                                                                                          \
  extern "C" __global__ void clear_idle_rows_##name(E* o, float* lse, const int32_t* cu_seqlens, int S, int width,     \
                                                    int heads) {                                                       \
    clear_idle_rows(o, lse, cu_seqlens, S, width, heads);                                                              \
  }                                                                                                                    \
  extern "C" __global__ void attention_##name(const E* x, const int32_t* cu_seqlens, E* o, float* lse, int T, int S,   \
                                              hotbunk::AttentionHeads heads, ScoreOptions scores) {                    \
    attention(x, cu_seqlens, o, lse, T, S, Heads(heads), scores);                                                      \
  }                                                                                                                    \
  extern "C" __global__ void attention_query_backward_##name(                                                          \
      const E* d_o, const E* x, const E* o, const float* lse, const int32_t* cu_seqlens, E* dx, float* delta, int T,   \
      int S, hotbunk::AttentionHeads heads, ScoreOptions scores) {                                                     \
    query_backward(d_o, x, o, lse, cu_seqlens, dx, delta, T, S, Heads(heads), scores);                                 \
  }                                                                                                                    \
  extern "C" __global__ void attention_key_backward_##name(                                                            \
      const E* d_o, const E* x, const float* lse, const float* delta, const int32_t* cu_seqlens, E* dx, int T, int S,  \
      hotbunk::AttentionHeads heads, ScoreOptions scores) {                                                            \
    key_backward(d_o, x, lse, delta, cu_seqlens, dx, T, S, Heads(heads), scores);                                      \
  }                                                                                                                    \
  extern "C" __global__ void kv_write_##name(const E* x, const int32_t* slots, E* pool, hotbunk::AttentionHeads heads, \
                                             int block_tokens, hotbunk::KeyShare keys) {                               \
    kv_write(x, slots, pool, Heads(heads), block_tokens, keys);                                                        \
  }                                                                                                                    \
  extern "C" __global__ void paged_attention_##name(                                                                   \
      const E* x, int width, const E* pool, const int32_t* cu_seqlens, const int32_t* tables, const int32_t* lengths,  \
      E* o, float* lse, int T, int S, hotbunk::AttentionHeads heads, int block_tokens, int max_blocks,                 \
      ScoreOptions scores, hotbunk::KeyShare keys) {                                                                   \
    paged_attention(x, width, pool, cu_seqlens, tables, lengths, o, lse, T, S, Heads(heads), block_tokens,             \
                    max_blocks, scores, keys);                                                                         \
  }
HB_ATTENTION(float, f32)
HB_ATTENTION(bf16, bf16)
