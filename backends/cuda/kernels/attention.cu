// Causal attention of packed sequences, its backward, and attention over a paged KV pool. Variant 1: a warp per row
// and head, no tiles (attention_rows.cuh). It is the oracle of variant 2 (attention_tiled.cu) and what computes fp32, which
// tensor cores have no product for: slow, but its order is the same whatever else is in the batch, and the same for
// training, prefill and decode: keys in ascending order, one after another.
#include "attention_rows.cuh"

namespace {

template <class E>
HB_DEVICE void attention(const E* x, const int32_t* cu_seqlens, E* o, float* lse, int T, int S, Heads h, float scale) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int begin = cu_seqlens[sequence_of(cu_seqlens, S, it.row)], w = h.width();
  float q[held];
  take(q, x + size_t(it.row) * w + it.head * h.d, h.d);
  const E *keys = x + size_t(begin) * w + h.key(it.head), *values = x + size_t(begin) * w + h.value(it.head);
  Attended found;
  found.add(
      q, it.row - begin + 1, h.d, scale, [&](int s) { return keys + size_t(s) * w; },
      [&](int s) { return values + size_t(s) * w; });
  const float log_sum = found.finish();
  give(o + (size_t(it.row) * h.a + it.head) * h.d, found.o, h.d);
  if ((threadIdx.x & 31) == 0) lse[size_t(it.row) * h.a + it.head] = log_sum;
}

/// dq of one row and head; delta[t, head] = sum do o is left for the keys' side.
template <class E>
HB_DEVICE void query_backward(const E* d_o, const E* x, const E* o, const float* lse, const int32_t* cu_seqlens, E* dx,
                              float* delta, int T, int S, Heads h, float scale) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int begin = cu_seqlens[sequence_of(cu_seqlens, S, it.row)], w = h.width();
  const size_t at = size_t(it.row) * h.a + it.head;
  float q[held], g[held], out[held], dq[held] = {};
  take(q, x + size_t(it.row) * w + it.head * h.d, h.d);
  take(g, d_o + at * h.d, h.d);
  take(out, o + at * h.d, h.d);
  const float own = dot(g, out);
  if ((threadIdx.x & 31) == 0) delta[at] = own;
  for (int s = begin; s <= it.row; ++s) {
    float k[held], v[held];
    take(k, x + size_t(s) * w + h.key(it.head), h.d);
    take(v, x + size_t(s) * w + h.value(it.head), h.d);
    const float p = expf(dot(q, k) * scale - lse[at]);
    add_scaled(dq, p * (dot(g, v) - own) * scale, k);
  }
  give(dx + size_t(it.row) * w + it.head * h.d, dq, h.d);
}

/// dk and dv of one row and key-value head: over its query heads, and over the later rows of its sequence, in order.
template <class E>
HB_DEVICE void key_backward(const E* d_o, const E* x, const float* lse, const float* delta, const int32_t* cu_seqlens,
                            E* dx, int T, int S, Heads h, float scale) {
  const Item it = item(T, h.k);
  if (!it.here) return;
  const int end = cu_seqlens[sequence_of(cu_seqlens, S, it.row) + 1], w = h.width(), group = h.a / h.k;
  float k[held], v[held], dk[held] = {}, dv[held] = {};
  take(k, x + size_t(it.row) * w + (h.a + it.head) * h.d, h.d);
  take(v, x + size_t(it.row) * w + (h.a + h.k + it.head) * h.d, h.d);
  for (int head = it.head * group; head < (it.head + 1) * group; ++head)
    for (int t = it.row; t < end; ++t) {
      const size_t at = size_t(t) * h.a + head;
      float q[held], g[held];
      take(q, x + size_t(t) * w + head * h.d, h.d);
      take(g, d_o + at * h.d, h.d);
      const float p = expf(dot(q, k) * scale - lse[at]);
      add_scaled(dv, p, g);
      add_scaled(dk, p * (dot(g, v) - delta[at]) * scale, q);
    }
  give(dx + size_t(it.row) * w + (h.a + it.head) * h.d, dk, h.d);
  give(dx + size_t(it.row) * w + (h.a + h.k + it.head) * h.d, dv, h.d);
}

/// The KV pool of one layer: [blocks][2][block_tokens][k d], first a block's keys, then its values.
template <class E>
HB_DEVICE void kv_write(const E* x, const int32_t* slots, E* pool, Heads h, int block_tokens) {
  const int t = blockIdx.x, slot = slots[t], row = h.k * h.d;
  if (slot < 0) return;
  const E* from = x + size_t(t) * h.width() + h.a * h.d;
  E* to = pool + (size_t(slot / block_tokens) * 2 * block_tokens + slot % block_tokens) * row;
  for (int j = threadIdx.x; j < row; j += blockDim.x) {
    to[j] = from[j];
    to[size_t(block_tokens) * row + j] = from[row + j];
  }
}

/// Row t is one of the last cu_seqlens[s + 1] - cu_seqlens[s] of sequence s, whose lengths[s] keys the pool holds.
template <class E>
HB_DEVICE void paged_attention(const E* x, const E* pool, const int32_t* cu_seqlens, const int32_t* tables,
                               const int32_t* lengths, E* o, int T, int S, Heads h, int block_tokens, int max_blocks,
                               float scale) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int s = sequence_of(cu_seqlens, S, it.row), row = h.k * h.d;
  const int n = lengths[s] == 0 ? 0 : lengths[s] - (cu_seqlens[s + 1] - 1 - it.row);
  const int32_t* table = tables + size_t(s) * max_blocks;
  const E* mine = pool + (it.head / (h.a / h.k)) * h.d;
  const auto key = [&](int i) {
    return mine + (size_t(table[i / block_tokens]) * 2 * block_tokens + i % block_tokens) * row;
  };
  float q[held];
  take(q, x + size_t(it.row) * h.width() + it.head * h.d, h.d);
  Attended found;
  found.add(q, n, h.d, scale, key, [&](int i) { return key(i) + size_t(block_tokens) * row; });
  found.finish();
  give(o + (size_t(it.row) * h.a + it.head) * h.d, found.o, h.d);
}

}  // namespace

/// Grids of attention, query_backward and paged_attention: T a warps; key_backward: T k warps; kv_write: T blocks.
#define HB_ATTENTION(E, name)                                                                                        \
  extern "C" __global__ void attention_##name(const E* x, const int32_t* cu_seqlens, E* o, float* lse, int T, int S, \
                                              int a, int k, int d, float scale) {                                    \
    attention(x, cu_seqlens, o, lse, T, S, {a, k, d}, scale);                                                        \
  }                                                                                                                  \
  extern "C" __global__ void attention_query_backward_##name(const E* d_o, const E* x, const E* o, const float* lse, \
                                                             const int32_t* cu_seqlens, E* dx, float* delta, int T,  \
                                                             int S, int a, int k, int d, float scale) {              \
    query_backward(d_o, x, o, lse, cu_seqlens, dx, delta, T, S, {a, k, d}, scale);                                   \
  }                                                                                                                  \
  extern "C" __global__ void attention_key_backward_##name(const E* d_o, const E* x, const float* lse,               \
                                                           const float* delta, const int32_t* cu_seqlens, E* dx,     \
                                                           int T, int S, int a, int k, int d, float scale) {         \
    key_backward(d_o, x, lse, delta, cu_seqlens, dx, T, S, {a, k, d}, scale);                                        \
  }                                                                                                                  \
  extern "C" __global__ void kv_write_##name(const E* x, const int32_t* slots, E* pool, int a, int k, int d,         \
                                             int block_tokens) {                                                     \
    kv_write(x, slots, pool, {a, k, d}, block_tokens);                                                               \
  }                                                                                                                  \
  extern "C" __global__ void paged_attention_##name(                                                                 \
      const E* x, const E* pool, const int32_t* cu_seqlens, const int32_t* tables, const int32_t* lengths, E* o,     \
      int T, int S, int a, int k, int d, int block_tokens, int max_blocks, float scale) {                            \
    paged_attention(x, pool, cu_seqlens, tables, lengths, o, T, S, {a, k, d}, block_tokens, max_blocks, scale);      \
  }
HB_ATTENTION(float, f32)
HB_ATTENTION(bf16, bf16)
