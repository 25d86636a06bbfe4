// Attention sinks: one more score of each head, with a value of zeros, that softmax counts. o and lse are of the keys
// alone before, of the sink too behind.
#include "common.cuh"

namespace {

/// In place; a warp per row of o [T, a v] and head. sinks: of these heads.
template <class E>
HB_DEVICE void attention_sinks(E* o, float* lse, const E* sinks, int T, int a, int v) {
  const int lane = threadIdx.x & 31;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= int64_t(T) * a) return;
  const float sum = lse[at], sink = load(sinks + at % a), top = fmaxf(sum, sink);
  const float both = top + logf(expf(sum - top) + expf(sink - top)), share = expf(sum - both);
  __syncwarp();  // all lanes have read lse
  for (int j = lane; j < v; j += 32) store(o + at * v + j, share * load(o + at * v + j));
  if (lane == 0) lse[at] = both;
}

/// In place: of what a rank's keys gave what they are of attention over those of all ranks, lses[ranks, T, a]. Where
/// there is no key, zeros and -inf.
template <class E>
HB_DEVICE void attention_part(E* o, float* lse, const float* lses, int ranks, int T, int a, int v) {
  const int lane = threadIdx.x & 31;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32, rows = int64_t(T) * a;
  if (at >= rows) return;
  float top = -INFINITY, sum = 0;
  for (int r = 0; r < ranks; ++r) top = fmaxf(top, lses[r * rows + at]);
  for (int r = 0; r < ranks && top > -INFINITY; ++r) sum += expf(lses[r * rows + at] - top);
  const float own = lse[at], all = top > -INFINITY ? top + logf(sum) : top;
  const float share = own > -INFINITY ? expf(own - all) : 0.0f;
  __syncwarp();  // all lanes have read lse
  for (int j = lane; j < v; j += 32) store(o + at * v + j, share * load(o + at * v + j));
  if (lane == 0) lse[at] = all;
}

/// dsinks[h] (-)= sum over rows of e^(sink - lse) do o: a block per head, in an order that its size alone makes, fp64.
template <class E, class G>
HB_DEVICE void attention_sinks_backward(const E* d_o, const E* o, const float* lse, const E* sinks, G* dsinks, int T,
                                        int a, int v, int accumulate) {
  __shared__ double part[32];
  const int head = blockIdx.x, lane = threadIdx.x & 31, warps = blockDim.x / 32;
  const float sink = load(sinks + head);
  double sum = 0;
  for (int t = threadIdx.x / 32; t < T; t += warps) {
    const size_t at = size_t(t) * a + head;
    float dot = 0;
    for (int j = lane; j < v; j += 32) dot += load(d_o + at * v + j) * load(o + at * v + j);
    dot = warp_sum(dot);
    if (lane == 0) sum += double(expf(sink - lse[at]) * dot);
  }
  sum = block_sum(sum, part);
  if (threadIdx.x == 0) store(dsinks + head, float((accumulate ? load(dsinks + head) : 0.0) - sum));
}

}  // namespace

#define HB_SINKS(E, name)                                                                                            \
  extern "C" __global__ void attention_sinks_##name(E* o, float* lse, const E* sinks, int T, int a, int v) {         \
    attention_sinks(o, lse, sinks, T, a, v);                                                                         \
  }                                                                                                                  \
  extern "C" __global__ void attention_sinks_part_##name(E* o, float* lse, const float* lses, int ranks, int T,      \
                                                         int a, int v) {                                             \
    attention_part(o, lse, lses, ranks, T, a, v);                                                                    \
  }
HB_SINKS(float, f32)
HB_SINKS(bf16, bf16)

/// Named by the dtypes of activations and gradients.
#define HB_SINKS_BACKWARD(E, G, name)                                                                                \
  extern "C" __global__ void attention_sinks_backward_##name(const E* d_o, const E* o, const float* lse,             \
                                                             const E* sinks, G* dsinks, int T, int a, int v,         \
                                                             int accumulate) {                                       \
    attention_sinks_backward(d_o, o, lse, sinks, dsinks, T, a, v, accumulate);                                       \
  }
HB_SINKS_BACKWARD(float, float, f32_f32)
HB_SINKS_BACKWARD(bf16, float, bf16_f32)
HB_SINKS_BACKWARD(bf16, bf16, bf16_bf16)
