// lora_merge: y[n,K] = w + factor b[n,r] a[r,K], each of its own dtype, in fp32 and rounded once. The other products of
// adapters are those of matmul.cu and matmul_f32.cu over columns of an activation.
#include "common.cuh"

namespace {

/// Ranks in order: an element's bits depend on its row of w and b and its column of a alone.
template <class W, class A, class Y>
HB_DEVICE void lora_merge(const W* w, const A* b, const A* a, Y* y, int n, int K, int r, float factor) {
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < int64_t(n) * K;
       at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = at / K, j = at - i * K;
    float sum = 0;
    for (int k = 0; k < r; ++k) sum = fmaf(load(b + i * r + k), load(a + int64_t(k) * K + j), sum);
    store(y + at, load(w + at) + factor * sum);
  }
}

}  // namespace

#define HB_LORA_MERGE(W, A, Y, name)                                                                               \
  extern "C" __global__ void lora_merge_##name(const W* w, const A* b, const A* a, Y* y, int n, int K, int r,      \
                                               float factor) {                                                     \
    lora_merge(w, b, a, y, n, K, r, factor);                                                                       \
  }
HB_LORA_MERGE(float, float, float, f32_f32_f32)
HB_LORA_MERGE(float, float, bf16, f32_f32_bf16)
HB_LORA_MERGE(float, bf16, float, f32_bf16_f32)
HB_LORA_MERGE(float, bf16, bf16, f32_bf16_bf16)
HB_LORA_MERGE(bf16, float, float, bf16_f32_f32)
HB_LORA_MERGE(bf16, float, bf16, bf16_f32_bf16)
HB_LORA_MERGE(bf16, bf16, float, bf16_bf16_f32)
HB_LORA_MERGE(bf16, bf16, bf16, bf16_bf16_bf16)
