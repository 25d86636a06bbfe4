// rope: rotates the query and key heads of qkv[T,Q] in place. Of the first `turned` numbers of a head, pairs (j, j +
// turned / 2), as Hugging Face does; or of its last `turned` numbers neighbours as pairs (kernels of names in
// rope_neighbours), as DeepSeek's latent attention does. The angle is position * inv_freq in fp32; cosines and sines are
// times `amplitude`. sign -1: the backward rotation.
#include "rope.cuh"

namespace {

/// pair(head, j): its first element; `apart`: from there to the other.
template <class E, class Pair>
HB_DEVICE void rope(const int32_t* positions, const float* inv_freq, int heads, int half, int apart, float amplitude,
                    float sign, Pair pair) {
  const float position = float(positions[blockIdx.x]);
  for (int at = threadIdx.x; at < heads * half; at += blockDim.x) {
    const int head = at / half, j = at - head * half;
    E* low = pair(head, j);
    const float2 y = turned_pair(load(low), load(low + apart), position * inv_freq[j], amplitude, sign);
    store(low, y.x);
    store(low + apart, y.y);
  }
}

}  // namespace

/// heads: query and key heads together; width: elements of a row of qkv. A block per row.
#define HB_ROPE(E, name)                                                                                               \
  extern "C" __global__ void rope_##name(E* qkv, const int32_t* positions, const float* inv_freq, int heads, int width, \
                                         int d, int turned, float amplitude, float sign) {                             \
    E* row = qkv + size_t(blockIdx.x) * width;                                                                         \
    rope<E>(positions, inv_freq, heads, turned / 2, turned / 2, amplitude, sign,                                       \
            [&](int head, int j) { return row + head * d + j; });                                                      \
  }                                                                                                                    \
  extern "C" __global__ void rope_neighbours_##name(E* x, const int32_t* positions, const float* inv_freq, int heads,  \
                                                    int width, int d, int turned, float amplitude, float sign) {       \
    E* row = x + size_t(blockIdx.x) * width;                                                                           \
    rope<E>(positions, inv_freq, heads, turned / 2, 1, amplitude, sign,                                                \
            [&](int head, int j) { return row + (head + 1) * d - turned + 2 * j; });                                   \
  }
HB_ROPE(float, f32)
HB_ROPE(bf16, bf16)
