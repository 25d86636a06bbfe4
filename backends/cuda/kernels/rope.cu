// rope: rotates the query and key heads of qkv[T,Q] in place, pairs (j, j + d/2) as Hugging Face does. The angle is
// position * inv_freq in fp32. sign -1: the backward rotation.
#include "common.cuh"

namespace {

template <class E>
HB_DEVICE void rope(E* qkv, const int32_t* positions, const float* inv_freq, int heads, int width, int d, float sign) {
  const int t = blockIdx.x, half = d / 2;
  E* row = qkv + size_t(t) * width;
  for (int at = threadIdx.x; at < heads * half; at += blockDim.x) {
    const int head = at / half, j = at - head * half;
    const float angle = float(positions[t]) * inv_freq[j];
    const float c = cosf(angle), s = sign * sinf(angle);
    E *low = row + head * d + j, *high = low + half;
    const float a = load(low), b = load(high);
    store(low, a * c - b * s);
    store(high, b * c + a * s);
  }
}

}  // namespace

/// heads: query and key heads together; width: elements of a row of qkv.
extern "C" __global__ void rope_f32(float* qkv, const int32_t* positions, const float* inv_freq, int heads, int width,
                                    int d, float sign) {
  rope(qkv, positions, inv_freq, heads, width, d, sign);
}
extern "C" __global__ void rope_bf16(bf16* qkv, const int32_t* positions, const float* inv_freq, int heads, int width,
                                     int d, float sign) {
  rope(qkv, positions, inv_freq, heads, width, d, sign);
}
