// embedding: rows of a table by id; ids outside [begin, end) give zero rows (vocabulary split over ranks). Backward
// adds each token's gradient to its row, tokens in order: a thread per column of one block per vocabulary row would
// read all ids, so tokens are walked by one thread per column instead; deterministic, and small beside the head's
// gradient.
#include "common.cuh"

namespace {

template <class E>
HB_DEVICE void embedding(const E* table, const int32_t* ids, E* y, int H, int begin, int end) {
  const int id = ids[blockIdx.x];
  const bool here = id >= begin && id < end;
  for (int j = threadIdx.x; j < H; j += blockDim.x)
    y[size_t(blockIdx.x) * H + j] = here ? table[size_t(id - begin) * H + j] : E(0.0f);
}

template <class E>
HB_DEVICE void embedding_backward(const int32_t* ids, const E* dy, float* dtable, int T, int H, int begin, int end) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= H) return;
  for (int t = 0; t < T; ++t) {
    const int id = ids[t];
    if (id >= begin && id < end) dtable[size_t(id - begin) * H + j] += load(dy + size_t(t) * H + j);
  }
}

}  // namespace

#define HB_EMBEDDING(E, name)                                                                                        \
  extern "C" __global__ void embedding_##name(const E* table, const int32_t* ids, E* y, int H, int begin, int end) { \
    embedding(table, ids, y, H, begin, end);                                                                         \
  }                                                                                                                  \
  extern "C" __global__ void embedding_backward_##name(const int32_t* ids, const E* dy, float* dtable, int T, int H, \
                                                       int begin, int end) {                                         \
    embedding_backward(ids, dy, dtable, T, H, begin, end);                                                           \
  }
HB_EMBEDDING(float, f32)
HB_EMBEDDING(bf16, bf16)
