// What kernels of attention with a warp per row and head share. A lane holds elements lane, lane + 32, … of a head: d and v
// at most 256. qkv row: [a query heads | k key heads | k value heads]; query head i reads key-value head i / (a / k).
#pragma once
#include "held_keys.cuh"

using hotbunk::ScoreOptions;

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

/// A product of a query and a key as softmax takes it, rounded where it stands: no later sum may take it in, or training
/// and rollout, which are other kernels, would round differently (P5). slope(score): how much it moves where scale q k does.
HB_DEVICE float score_of(const ScoreOptions& s, float product) {
  const float x = __fmul_rn(product, s.scale);
  return s.softcap > 0.0f ? __fmul_rn(s.softcap, tanhf(x / s.softcap)) : x;
}
HB_DEVICE float slope(const ScoreOptions& s, float score) {
  const float t = s.softcap > 0.0f ? score / s.softcap : 0.0f;
  return 1.0f - t * t;
}
/// The first key that the query at this position sees.
HB_DEVICE int first_seen(const ScoreOptions& s, int position) {
  return s.window > 0 ? max(0, position - s.window + 1) : 0;
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

/// Softmax as keys come, one after another: of those so far the largest score, sum e^(score - it) and the weighted values.
struct Attended {
  float most = -INFINITY, sum = 0;
  float o[held] = {};

  /// Keys [begin, end) more; key(i), value(i): where row i lies, of d and of v numbers.
  template <class Key, class Value>
  HB_DEVICE void add(const float (&q)[held], int begin, int end, int d, int v_d, const ScoreOptions& scores, Key key,
                     Value value) {
    for (int s = begin; s < end; ++s) {
      float k[held], v[held];
      take(k, key(s), d);
      const float score = score_of(scores, dot(q, k));
      const float next = fmaxf(most, score), shrink = expf(most - next), p = expf(score - next);
      take(v, value(s), v_d);
#pragma unroll
      for (int i = 0; i < held; ++i) o[i] = o[i] * shrink + p * v[i];
      sum = sum * shrink + p;
      most = next;
    }
  }
  /// The context becomes what is attended; returns log sum e^score. Without a key zeros and -inf.
  HB_DEVICE float finish() {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < held; ++i) o[i] *= inverse;
    return most + logf(sum);
  }
};

struct Heads : hotbunk::AttentionHeads {
  HB_DEVICE Heads(const hotbunk::AttentionHeads& h) : hotbunk::AttentionHeads(h) {}
  HB_DEVICE int group() const { return a / k; }
  HB_DEVICE int of_keys() const { return k * (d + v); }  // of a row, keys and values
  HB_DEVICE int width() const { return a * d + of_keys(); }
  /// Where in a row key-value head i has its key and its value.
  HB_DEVICE int key(int i) const { return (a + i) * d; }
  HB_DEVICE int value(int i) const { return (a + k) * d + i * v; }
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
