// embedding: rows of a table by id, times factor, which is rounded to their dtype first; ids outside [begin, end) give
// zero rows (vocabulary split over ranks). Backward adds each token's gradient to its row. Tokens of one id are a chain,
// which its first token's block walks: their gradients are summed in order, in fp32, and rounded once.
#include "common.cuh"

namespace {

template <class E>
HB_DEVICE void embedding(const E* table, const int32_t* ids, E* y, int H, int begin, int end, float factor) {
  const int id = ids[blockIdx.x];
  const float times = float(E(factor));
  const bool here = id >= begin && id < end;
  for (int j = threadIdx.x; j < H; j += blockDim.x)
    store(y + size_t(blockIdx.x) * H + j, here ? load(table + size_t(id - begin) * H + j) * times : 0.0f);
}

/// A block per token.
template <class E, class G>
HB_DEVICE void embedding_backward(const int32_t* ids, const int32_t* chain, const E* dy, G* dtable, int T, int H,
                                  int begin, int end, float factor) {
  const int first = blockIdx.x, id = ids[first];
  if (chain[first] < 0 || id < begin || id >= end) return;
  const float times = float(E(factor));
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    G* to = dtable + size_t(id - begin) * H + j;
    float sum = load(to);
    for (int t = first; t < T;) {
      sum += load(dy + size_t(t) * H + j) * times;
      const int next = chain[t];
      t = next < 0 ? ~next : next;
    }
    store(to, sum);
  }
}

}  // namespace

/// chain[t]: the next token of the same id, T behind the last; ~ of that where t is not the first. A thread per token.
extern "C" __global__ void embedding_chain(const int32_t* ids, int32_t* chain, int T) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= T) return;
  const int id = ids[t];
  int next = t + 1, before = 0;
  while (next < T && ids[next] != id) ++next;
  while (before < t && ids[before] != id) ++before;
  chain[t] = before < t ? ~next : next;
}

#define HB_EMBEDDING(E, name)                                                                                        \
  extern "C" __global__ void embedding_##name(const E* table, const int32_t* ids, E* y, int H, int begin, int end,   \
                                              float factor) {                                                        \
    embedding(table, ids, y, H, begin, end, factor);                                                                 \
  }
HB_EMBEDDING(float, f32)
HB_EMBEDDING(bf16, bf16)

/// Named by the dtypes of activations and gradients.
#define HB_EMBEDDING_BACKWARD(E, G, name)                                                                          \
  extern "C" __global__ void embedding_backward_##name(const int32_t* ids, const int32_t* chain, const E* dy,      \
                                                       G* dtable, int T, int H, int begin, int end, float factor) { \
    embedding_backward(ids, chain, dy, dtable, T, H, begin, end, factor);                                          \
  }
HB_EMBEDDING_BACKWARD(float, float, f32_f32)
HB_EMBEDDING_BACKWARD(bf16, float, bf16_f32)
HB_EMBEDDING_BACKWARD(bf16, bf16, bf16_bf16)
