// embedding: rows of a table by id, times factor, which is rounded to their dtype first; ids outside [begin, end) give
// zero rows (vocabulary split over ranks). Backward
// adds each token's gradient to its row, tokens in order: a thread per column of one block per vocabulary row would
// read all ids, so tokens are walked by one thread per column instead; deterministic, and small beside the head's
// gradient.
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

template <class E>
HB_DEVICE void embedding_backward(const int32_t* ids, const E* dy, float* dtable, int T, int H, int begin, int end,
                                  float factor) {
  const float times = float(E(factor));
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= H) return;
  for (int t = 0; t < T; ++t) {
    const int id = ids[t];
    if (id >= begin && id < end) dtable[size_t(id - begin) * H + j] += load(dy + size_t(t) * H + j) * times;
  }
}

}  // namespace

#define HB_EMBEDDING(E, name)                                                                                        \
  extern "C" __global__ void embedding_##name(const E* table, const int32_t* ids, E* y, int H, int begin, int end,   \
                                              float factor) {                                                        \
    embedding(table, ids, y, H, begin, end, factor);                                                                 \
  }                                                                                                                  \
  extern "C" __global__ void embedding_backward_##name(const int32_t* ids, const E* dy, float* dtable, int T, int H, \
                                                       int begin, int end, float factor) {                           \
    embedding_backward(ids, dy, dtable, T, H, begin, end, factor);                                                   \
  }
HB_EMBEDDING(float, f32)
HB_EMBEDDING(bf16, bf16)
