// Attention of a context-parallel rank: its queries against its own keys and values, another rank's as they come around a
// ring, or everybody's; what is found is merged with what other keys gave by the log-sum-exps (Liu et al., Ring
// Attention, arXiv 2310.01889). Backward; the columns of keys and values, taken and put back. A warp per row and head.
//
// Of each sequence, cut into 2 ranks chunks, rank r has the r-th and then the r-th from the end. cu_seqlens counts what a
// rank has, each sequence of an even number of rows. kv[parts, T, k (d + v)]: keys, then values.
#include "attention_rows.cuh"

namespace {

/// Whose queries, and whose keys and values: all ranks' or one's.
struct Share {
  int ranks, place, source, all;
  HB_DEVICE int parts() const { return all ? ranks : 1; }
  HB_DEVICE int owner(int part) const { return all ? part : source; }
};

/// Where the i-th chunk that a rank has of a sequence begins in the sequence, of chunks of this length.
HB_DEVICE int chunk_begin(int ranks, int place, int i, int length) {
  return (i == 0 ? place : 2 * ranks - 1 - place) * length;
}

/// A row of a rank: of which sequence, and at which position.
struct Place {
  int begin, length, position;  // the sequence's first row here, tokens of a chunk
  HB_DEVICE Place(const int32_t* cu_seqlens, int S, int row, int ranks, int place) {
    const int s = sequence_of(cu_seqlens, S, row);
    begin = cu_seqlens[s];
    length = (cu_seqlens[s + 1] - begin) / 2;
    const int chunk = row - begin >= length ? 1 : 0;
    position = chunk_begin(ranks, place, chunk, length) + row - begin - chunk * length;
  }
};

/// Calls visit(first row of kv, begin, end) for each chunk of keys, of which a query at `at` sees rows [begin, end).
template <class Visit>
HB_DEVICE void each_run(const Share& share, const Place& at, int T, const ScoreOptions& scores, Visit visit) {
  for (int part = 0; part < share.parts(); ++part)
    for (int i = 0; i < 2; ++i) {
      const int chunk = chunk_begin(share.ranks, share.owner(part), i, at.length);
      visit(part * T + at.begin + i * at.length, max(0, first_seen(scores, at.position) - chunk),
            min(at.position + 1 - chunk, at.length));
    }
}

template <class E, class O>
HB_DEVICE void forward(const E* x, const E* kv, const int32_t* cu_seqlens, O* o, float* lse, int T, int S,
                       const Heads& h, const Share& share, const ScoreOptions& scores, int accumulate) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const Place at(cu_seqlens, S, it.row, share.ranks, share.place);
  const int w = h.of_keys(), head = it.head / h.group();
  float q[held];
  take(q, x + size_t(it.row) * h.width() + it.head * h.d, h.d);
  Attended found;
  each_run(share, at, T, scores, [&](int row, int begin, int end) {
    const E *keys = kv + size_t(row) * w + head * h.d, *values = kv + size_t(row) * w + h.k * h.d + head * h.v;
    found.add(
        q, begin, end, h.d, h.v, scores, [&](int s) { return keys + size_t(s) * w; },
        [&](int s) { return values + size_t(s) * w; });
  });
  const bool any = found.sum != 0.0f;
  const float log_sum = found.finish();
  const size_t to = size_t(it.row) * h.a + it.head;
  if (!accumulate) {
    give(o + to * h.v, found.o, h.v);
    if ((threadIdx.x & 31) == 0) lse[to] = log_sum;
    return;
  }
  const float before = lse[to];
  __syncwarp();  // all lanes have read it
  if (!any) return;
  const float top = fmaxf(before, log_sum), both = top + logf(expf(before - top) + expf(log_sum - top));
  const float of_old = expf(before - both), of_found = expf(log_sum - both);
  float old[held];
  take(old, o + to * h.v, h.v);
#pragma unroll
  for (int i = 0; i < held; ++i) old[i] = old[i] * of_old + found.o[i] * of_found;
  give(o + to * h.v, old, h.v);
  if ((threadIdx.x & 31) == 0) lse[to] = both;
}

/// dq (+)= of one row and head; delta[t, head] = sum do o is left for the keys' side.
template <class E>
HB_DEVICE void query_backward(const E* d_o, const E* x, const E* kv, const E* o, const float* lse,
                              const int32_t* cu_seqlens, float* dq, float* delta, int T, int S, const Heads& h,
                              const Share& share, const ScoreOptions& scores, int accumulate) {
  const Item it = item(T, h.a);
  if (!it.here) return;
  const Place at(cu_seqlens, S, it.row, share.ranks, share.place);
  const int w = h.of_keys(), head = it.head / h.group();
  const size_t to = size_t(it.row) * h.a + it.head;
  float q[held], g[held], out[held], sum[held] = {};
  take(q, x + size_t(it.row) * h.width() + it.head * h.d, h.d);
  take(g, d_o + to * h.v, h.v);
  take(out, o + to * h.v, h.v);
  const float own = dot(g, out), log_sum = lse[to];
  if ((threadIdx.x & 31) == 0) delta[to] = own;
  each_run(share, at, T, scores, [&](int row, int begin, int end) {
    for (int s = row + begin; s < row + end; ++s) {
      float k[held], v[held];
      take(k, kv + size_t(s) * w + head * h.d, h.d);
      take(v, kv + size_t(s) * w + h.k * h.d + head * h.v, h.v);
      const float score = score_of(scores, dot(q, k)), p = expf(score - log_sum);
      add_scaled(sum, p * (dot(g, v) - own) * slope(scores, score) * scores.scale, k);
    }
  });
  if (accumulate) {
    take(out, dq + to * h.d, h.d);
    add_scaled(sum, 1.0f, out);
  }
  give(dq + to * h.d, sum, h.d);
}

/// dk and dv of one row of a part and key-value head: over its query heads, and over the rows here that see it, in order.
template <class E>
HB_DEVICE void key_backward(const E* d_o, const E* x, const E* kv, const float* lse, const float* delta,
                            const int32_t* cu_seqlens, float* dkv, int T, int S, const Heads& h, const Share& share,
                            const ScoreOptions& scores) {
  const Item it = item(share.parts() * T, h.k);
  if (!it.here) return;
  const Place at(cu_seqlens, S, it.row % T, share.ranks, share.owner(it.row / T));
  const int w = h.of_keys(), group = h.group();
  const size_t key = size_t(it.row) * w + it.head * h.d, value = size_t(it.row) * w + h.k * h.d + it.head * h.v;
  float k[held], v[held], dk[held] = {}, dv[held] = {};
  take(k, kv + key, h.d);
  take(v, kv + value, h.v);
  for (int head = it.head * group; head < (it.head + 1) * group; ++head)
    for (int i = 0; i < 2; ++i) {
      const int unseen = at.position - chunk_begin(share.ranks, share.place, i, at.length);
      const int chunk = at.begin + i * at.length;
      const int end = scores.window > 0 ? min(at.length, unseen + scores.window) : at.length;
      for (int t = chunk + max(0, unseen); t < chunk + end; ++t) {
        const size_t row = size_t(t) * h.a + head;
        float q[held], g[held];
        take(q, x + size_t(t) * h.width() + head * h.d, h.d);
        take(g, d_o + row * h.v, h.v);
        const float score = score_of(scores, dot(q, k)), p = expf(score - lse[row]);
        add_scaled(dv, p, g);
        add_scaled(dk, p * (dot(g, v) - delta[row]) * slope(scores, score) * scores.scale, q);
      }
    }
  give(dkv + key, dk, h.d);
  give(dkv + value, dv, h.v);
}

}  // namespace

#define HB_CONTEXT_ARGUMENTS \
  int T, int S, hotbunk::AttentionHeads heads, int ranks, int place, int source, int all, ScoreOptions scores
#define HB_SHARE Share{ranks, place, source, all}

/// Grid: T a warps.
#define HB_CONTEXT(E, O, name)                                                                                  \
  extern "C" __global__ void context_attention_##name(const E* x, const E* kv, const int32_t* cu_seqlens, O* o, \
                                                      float* lse, HB_CONTEXT_ARGUMENTS, int accumulate) {       \
    forward(x, kv, cu_seqlens, o, lse, T, S, Heads(heads), HB_SHARE, scores, accumulate);                       \
  }
HB_CONTEXT(float, float, f32_f32)
HB_CONTEXT(bf16, bf16, bf16_bf16)
HB_CONTEXT(bf16, float, bf16_f32)

/// Grids: T a warps, and parts T k warps. take_kv, merge_qkv: a block per row. more: null or added to dkv.
#define HB_CONTEXT_BACKWARD(E, name)                                                                             \
  extern "C" __global__ void context_attention_query_backward_##name(                                            \
      const E* d_o, const E* x, const E* kv, const E* o, const float* lse, const int32_t* cu_seqlens, float* dq, \
      float* delta, HB_CONTEXT_ARGUMENTS, int accumulate) {                                                      \
    query_backward(d_o, x, kv, o, lse, cu_seqlens, dq, delta, T, S, Heads(heads), HB_SHARE, scores, accumulate); \
  }                                                                                                              \
  extern "C" __global__ void context_attention_key_backward_##name(                                              \
      const E* d_o, const E* x, const E* kv, const float* lse, const float* delta, const int32_t* cu_seqlens,    \
      float* dkv, HB_CONTEXT_ARGUMENTS) {                                                                        \
    key_backward(d_o, x, kv, lse, delta, cu_seqlens, dkv, T, S, Heads(heads), HB_SHARE, scores);                 \
  }                                                                                                              \
  extern "C" __global__ void take_kv_##name(const E* x, E* kv, int queries, int keys) {                          \
    const size_t from = size_t(blockIdx.x) * (queries + keys) + queries, to = size_t(blockIdx.x) * keys;         \
    for (int j = threadIdx.x; j < keys; j += blockDim.x) kv[to + j] = x[from + j];                               \
  }                                                                                                              \
  extern "C" __global__ void merge_qkv_##name(const float* dq, const float* dkv, const float* more, E* dx,       \
                                              int queries, int keys) {                                           \
    const size_t q = size_t(blockIdx.x) * queries, kv = size_t(blockIdx.x) * keys, to = q + kv;                  \
    for (int j = threadIdx.x; j < queries; j += blockDim.x) store(dx + to + j, dq[q + j]);                       \
    for (int j = threadIdx.x; j < keys; j += blockDim.x)                                                         \
      store(dx + to + queries + j, dkv[kv + j] + (more != nullptr ? more[kv + j] : 0.0f));                       \
  }
HB_CONTEXT_BACKWARD(float, f32)
HB_CONTEXT_BACKWARD(bf16, bf16)
