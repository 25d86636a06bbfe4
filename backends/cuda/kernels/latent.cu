// Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent of r numbers for each
// token, by a matrix; a key has behind that a rotated part of t numbers, which all heads share. Of a head's d numbers
// n = d - t are not rotated. Shapes as in graph/catalogue.h; a row's keys and values lie as attention takes them.
#include "held_keys.cuh"
#include "matmul.cuh"
#include "matmul_f32.cuh"
#include "norm_rows.cuh"
#include "rope.cuh"

using hotbunk::AttentionHeads;

namespace {

/// c: rms_norm of a row's first r columns; s: its last t, rotated as neighbours. A block per row.
template <class E>
HB_DEVICE void latent_norm(const E* x, const E* w, const int32_t* positions, const float* inv_freq, E* c, E* s,
                           float* rstd, int r, int t, float eps, float amplitude) {
  __shared__ float part[32];
  const E* row = x + size_t(blockIdx.x) * (r + t);
  float squares = 0;
  for (int j = threadIdx.x; j < r; j += blockDim.x) squares += load(row + j) * load(row + j);
  const float by = rsqrtf(block_sum(squares, part) / float(r) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = by;
  for (int j = threadIdx.x; j < r; j += blockDim.x)
    store(c + size_t(blockIdx.x) * r + j, load(row + j) * by * load(w + j));
  const float position = float(positions[blockIdx.x]);
  E* to = s + size_t(blockIdx.x) * t;
  for (int j = threadIdx.x; j < t / 2; j += blockDim.x) {
    const E* from = row + r + 2 * j;
    const float2 y = turned_pair(load(from), load(from + 1), position * inv_freq[j], amplitude, 1.0f);
    store(to + 2 * j, y.x);
    store(to + 2 * j + 1, y.y);
  }
}

/// What shares a part's rows: of a row's first r columns the norm's backward, of its last t the rotation back.
template <class E>
HB_DEVICE void latent_norm_backward(const NormRows<E>& in, const E* ds, const int32_t* positions, const float* inv_freq,
                                    int t, float amplitude, float* shared) {
  rms_norm_rows(in, 0.0f, 0, shared);
  for (int i = in.begin; i < in.end; ++i) {
    const E* from = ds + size_t(i) * t;
    E* to = in.dx + size_t(i) * in.ld_x + in.H;
    for (int j = threadIdx.x; j < t / 2; j += blockDim.x) {
      const float2 y =
          turned_pair(load(from + 2 * j), load(from + 2 * j + 1), float(positions[i]) * inv_freq[j], amplitude, -1.0f);
      store(to + 2 * j, y.x);
      store(to + 2 * j + 1, y.y);
    }
  }
}

/// A row of [a queries | a keys | a values] of its queries, keys and values, and of the part that keys share; and back,
/// where the shared part's gradient is the sum over heads, fp32. A block per row.
template <class E>
HB_DEVICE void latent_heads(const E* q, const E* kv, const E* s, E* x, const AttentionHeads& h, int t) {
  const int n = h.d - t, of_head = n + h.v, queries = h.a * h.d, width = h.a * (2 * h.d + h.v);
  const E *from = kv + size_t(blockIdx.x) * h.a * of_head, *shared = s + size_t(blockIdx.x) * t;
  E* to = x + size_t(blockIdx.x) * width;
  for (int j = threadIdx.x; j < width; j += blockDim.x) {
    const int key = j - queries, value = key - queries, i = key % h.d;
    if (key < 0) to[j] = q[size_t(blockIdx.x) * queries + j];
    else if (value >= 0) to[j] = from[value / h.v * of_head + n + value % h.v];
    else to[j] = i < n ? from[key / h.d * of_head + i] : shared[i - n];
  }
}
template <class E>
HB_DEVICE void latent_heads_backward(const E* dx, E* dq, E* dkv, E* ds, const AttentionHeads& h, int t) {
  const int n = h.d - t, of_head = n + h.v, queries = h.a * h.d, width = h.a * (2 * h.d + h.v);
  const E *from = dx + size_t(blockIdx.x) * width, *keys = from + queries;
  E* to = dkv + size_t(blockIdx.x) * h.a * of_head;
  for (int j = threadIdx.x; j < queries; j += blockDim.x) {
    dq[size_t(blockIdx.x) * queries + j] = from[j];
    if (j % h.d < n) to[j / h.d * of_head + j % h.d] = keys[j];
  }
  for (int j = threadIdx.x; j < h.a * h.v; j += blockDim.x) to[j / h.v * of_head + n + j % h.v] = keys[queries + j];
  for (int j = threadIdx.x; j < t; j += blockDim.x) {
    float sum = 0;
    for (int head = 0; head < h.a; ++head) sum += load(keys + head * h.d + n + j);
    store(ds + size_t(blockIdx.x) * t + j, sum);
  }
}

/// The pool of one layer: [blocks][block_tokens][r + t].
template <class E>
HB_DEVICE void latent_write(const E* c, const E* s, const int32_t* slots, E* pool, int r, int t, int block_tokens,
                            const HeldKeys& here) {
  const int slot = here.slot(slots[blockIdx.x], block_tokens);
  if (slot < 0) return;
  E* to = pool + size_t(slot) * (r + t);
  for (int j = threadIdx.x; j < r + t; j += blockDim.x)
    to[j] = j < r ? c[size_t(blockIdx.x) * r + j] : s[size_t(blockIdx.x) * t + j - r];
}

/// What the pool keeps of a sequence, as the rows of a matrix.
template <class E>
struct Kept {
  const E* base;
  int ld;
  const int32_t* table;
  int block_tokens;
  HB_DEVICE const E* row(int p) const {
    return base + (size_t(table[p / block_tokens]) * block_tokens + p % block_tokens) * ld;
  }
};

/// Keys and values of sequences, a block of `most` tokens for each, as paged attention reads them.
template <class E>
struct Expanded {
  E* keys;
  E* values;
  int most;
  HB_DEVICE Expanded(E* all, int sequence, const AttentionHeads& h, int most_)
      : keys(all + size_t(sequence) * most_ * h.a * (h.d + h.v)), values(keys + size_t(most_) * h.a * h.d), most(most_) {}
  /// Of column `column` of w's product for position p.
  HB_DEVICE E* at(int p, int column, const AttentionHeads& h, int n) const {
    const int head = column / (n + h.v), j = column % (n + h.v);
    const size_t row = size_t(head) * most + p;
    return j < n ? keys + row * h.d + j : values + row * h.v + j - n;
  }
};

/// What latent_attention is told of the sequences that a launch works on.
template <class E>
struct Sequences {
  const E* pool;
  const int32_t* tables;
  const int32_t* lengths;
  int max_blocks, block_tokens, r, t;
  HeldKeys here;
  HB_DEVICE int tokens(int s) const { return here.of(lengths[s]); }
  HB_DEVICE Kept<E> kept(int s) const { return {pool, r + t, tables + size_t(s) * max_blocks, block_tokens}; }
};

/// Keys and values but for the rotated part: what the pool keeps, times w[a (n + v), r] transposed. Block x: tile of
/// columns and sequence; y: tile of positions. So a key's bits are those that a linear layer over its latent gives it.
template <class E, int rows, int columns, class Multiply>
HB_DEVICE void expand(const Sequences<E>& in, E* expanded, const AttentionHeads& h, Multiply multiply) {
  const int n = h.d - in.t, N = h.a * (n + h.v), tiles = (N + columns - 1) / columns, s = blockIdx.x / tiles;
  const int row = blockIdx.y * rows, length = in.tokens(s);
  if (row >= length) return;
  const Expanded<E> out(expanded, s, h, in.max_blocks * in.block_tokens);
  multiply(
      in.kept(s), [&](int p, int column) { return out.at(p, column, h, n); }, length, N, row,
      int(blockIdx.x) % tiles * columns);
}

/// The rotated part, for each head; and table[s] = s, in whose block it lies. Block x: positions; y: sequence.
template <class E>
HB_DEVICE void share(const Sequences<E>& in, E* expanded, int32_t* table, const AttentionHeads& h) {
  const int s = blockIdx.y, n = h.d - in.t;
  const Kept<E> kept = in.kept(s);
  const Expanded<E> out(expanded, s, h, in.max_blocks * in.block_tokens);
  if (blockIdx.x == 0 && threadIdx.x == 0) table[s] = s;
  const int tokens = in.tokens(s);
  for (int p = blockIdx.x; p < tokens; p += gridDim.x) {
    const E* from = kept.row(p) + in.r;
    for (int j = threadIdx.x; j < h.a * in.t; j += blockDim.x)
      out.keys[(size_t(j / in.t) * out.most + p) * h.d + n + j % in.t] = from[j % in.t];
  }
}

}  // namespace

#define HB_SEQUENCES(E)                                                                                         \
  const E *pool, const int32_t *tables, const int32_t *lengths, int max_blocks, int block_tokens, int r, int t, \
      hotbunk::KeyShare keys
#define HB_ALL_SEQUENCES \
  { pool, tables, lengths, max_blocks, block_tokens, r, t, keys }

extern "C" __global__ void __launch_bounds__(128)
    latent_expand_bf16(HB_SEQUENCES(bf16), const bf16* w, bf16* expanded, AttentionHeads heads) {
  using namespace matmul_bf16;
  expand<bf16, tile, tile>(HB_ALL_SEQUENCES, expanded, heads,
                           [&](const Kept<bf16>& kept, auto to, int length, int N, int row, int column) {
                             multiply_tile<false, false>(
                                 kept, Rows{w, r}, [](int) { return 0.0f; }, to, length, N, r, 0, row, column);
                           });
}
extern "C" __global__ void __launch_bounds__(32, 16)
    latent_expand_f32(HB_SEQUENCES(float), const float* w, float* expanded, AttentionHeads heads) {
  using namespace matmul_f32;
  expand<float, rows_of_tile, columns_of_tile>(
      HB_ALL_SEQUENCES, expanded, heads, [&](const Kept<float>& kept, auto to, int length, int N, int row, int column) {
        multiply_tile<false, false>(
            kept, Rows{w, r}, [](int) { return 0.0f; }, to, length, N, r, 0, row, column);
      });
}

#define HB_LATENT(E, name)                                                                                             \
  extern "C" __global__ void latent_norm_##name(const E* x, const E* w, const int32_t* positions,                      \
                                                const float* inv_freq, E* c, E* s, float* rstd, int r, int t,          \
                                                float eps, float amplitude) {                                          \
    latent_norm(x, w, positions, inv_freq, c, s, rstd, r, t, eps, amplitude);                                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512) latent_norm_backward_##name(                                       \
      const E* dc, const E* ds, const E* x, const E* w, const float* rstd, const int32_t* positions,                   \
      const float* inv_freq, E* dx, float* parts, int T, int r, int t, int each, float amplitude) {                    \
    __shared__ float shared[32];                                                                                       \
    const int begin = blockIdx.x * each;                                                                               \
    float* part = parts + size_t(blockIdx.x) * r;                                                                      \
    latent_norm_backward<E>({dc, x, w, rstd, dx, part, begin, min(begin + each, T), r, r, r + t}, ds, positions,       \
                            inv_freq, t, amplitude, shared);                                                           \
  }                                                                                                                    \
  extern "C" __global__ void latent_heads_##name(const E* q, const E* kv, const E* s, E* x, AttentionHeads heads,      \
                                                 int t) {                                                              \
    latent_heads(q, kv, s, x, heads, t);                                                                               \
  }                                                                                                                    \
  extern "C" __global__ void latent_heads_backward_##name(const E* dx, E* dq, E* dkv, E* ds, AttentionHeads heads,     \
                                                          int t) {                                                     \
    latent_heads_backward(dx, dq, dkv, ds, heads, t);                                                                  \
  }                                                                                                                    \
  extern "C" __global__ void latent_write_##name(const E* c, const E* s, const int32_t* slots, E* pool, int r, int t,  \
                                                 int block_tokens, hotbunk::KeyShare keys) {                           \
    latent_write(c, s, slots, pool, r, t, block_tokens, keys);                                                         \
  }                                                                                                                    \
  extern "C" __global__ void latent_share_##name(HB_SEQUENCES(E), E* expanded, int32_t* table, AttentionHeads heads) { \
    share<E>(HB_ALL_SEQUENCES, expanded, table, heads);                                                                \
  }
HB_LATENT(float, f32)
HB_LATENT(bf16, bf16)
