// Causal attention of packed sequences, its backward, and attention over a paged KV pool. Variant 1: a warp per row
// and head, no tiles. It is the oracle of what comes later and the fallback: slow, but its order is the same whatever
// else is in the batch, and the same for training, prefill and decode: keys in ascending order, one after another.
//
// qkv row: [a query heads | k key heads | k value heads], d each; query head i reads key-value head i / (a / k).
// A lane holds elements lane, lane + 32, …: d at most 256.
#include "common.cuh"

namespace {

constexpr int held = 8;  // elements of a head in a lane

template <class E>
HB_DEVICE void take(float (&r)[held], const E* from, int d) {
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int j = int(threadIdx.x & 31) + 32 * i;
    r[i] = j < d ? load(from + j) : 0.0f;
  }
}
template <class E>
HB_DEVICE void give(E* to, const float (&r)[held], int d) {
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int j = int(threadIdx.x & 31) + 32 * i;
    if (j < d) store(to + j, r[i]);
  }
}
HB_DEVICE float dot(const float (&a)[held], const float (&b)[held]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < held; ++i) sum += a[i] * b[i];
  return warp_sum(sum);
}
HB_DEVICE void add_scaled(float (&to)[held], float c, const float (&x)[held]) {
#pragma unroll
  for (int i = 0; i < held; ++i) to[i] += c * x[i];
}

/// The sequence that holds row t: cu_seqlens[s] <= t < cu_seqlens[s + 1].
HB_DEVICE int sequence_of(const int32_t* cu_seqlens, int S, int t) {
  int low = 0, high = S;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle] <= t) low = middle;
    else high = middle;
  }
  return low;
}

/// Softmax over n keys, one after another; key(i), value(i): where row i of the context lies. Returns log sum e^score.
template <class Key, class Value>
HB_DEVICE float attend(const float (&q)[held], int n, int d, float scale, Key key, Value value, float (&o)[held]) {
  float most = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < held; ++i) o[i] = 0;
  for (int s = 0; s < n; ++s) {
    float k[held], v[held];
    take(k, key(s), d);
    const float score = dot(q, k) * scale;
    const float next = fmaxf(most, score), shrink = expf(most - next), p = expf(score - next);
    take(v, value(s), d);
#pragma unroll
    for (int i = 0; i < held; ++i) o[i] = o[i] * shrink + p * v[i];
    sum = sum * shrink + p;
    most = next;
  }
  const float inverse = n > 0 ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < held; ++i) o[i] *= inverse;
  return most + logf(sum);
}

struct Heads {
  int a, k, d;
  HB_DEVICE int width() const { return (a + 2 * k) * d; }
  HB_DEVICE int key(int head) const { return (a + head / (a / k)) * d; }
  HB_DEVICE int value(int head) const { return (a + k + head / (a / k)) * d; }
};

/// Row and head of this warp: grid x covers rows * heads.
struct Item {
  int row, head;
  bool here;
};
HB_DEVICE Item item(int rows, int heads) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  return {int(at / heads), int(at % heads), at < int64_t(rows) * heads};
}

template <class E>
HB_DEVICE void attention(const E* x, const int32_t* cu_seqlens, E* o, float* lse, int T, int S, Heads h, float scale) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const int begin = cu_seqlens[sequence_of(cu_seqlens, S, it.row)], w = h.width();
  float q[held], out[held];
  take(q, x + size_t(it.row) * w + it.head * h.d, h.d);
  const E *keys = x + size_t(begin) * w + h.key(it.head), *values = x + size_t(begin) * w + h.value(it.head);
  const float log_sum = attend(
      q, it.row - begin + 1, h.d, scale, [&](int s) { return keys + size_t(s) * w; },
      [&](int s) { return values + size_t(s) * w; }, out);
  give(o + (size_t(it.row) * h.a + it.head) * h.d, out, h.d);
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
  float q[held], out[held];
  take(q, x + size_t(it.row) * h.width() + it.head * h.d, h.d);
  attend(
      q, n, h.d, scale, key, [&](int i) { return key(i) + size_t(block_tokens) * row; }, out);
  give(o + (size_t(it.row) * h.a + it.head) * h.d, out, h.d);
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
