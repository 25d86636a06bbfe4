// Matrix products on mma.sync, the fallback and the oracle of cuBLASLt. C[M,N] (+)= A B with
//   nt: A[M,K] row-major, B[N,K] row-major   (linear: x w^T)
//   nn: A[M,K], B[K,N]                       (linear_dgrad: dy w)
//   tn: A[K,M], B[K,N]                       (linear_wgrad: dy^T x)
// How a tile is formed: matmul.cuh.
#include "matmul.cuh"

namespace {

template <bool transposed_a, bool transposed_b, class C>
HB_DEVICE void matmul(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) {
  matmul_bf16::multiply_tile<transposed_a, transposed_b>(
      a, b, [&](int n) { return bias != nullptr ? load(bias + n) : 0.0f; }, c, M, N, K, accumulate,
      int(blockIdx.y) * matmul_bf16::tile, int(blockIdx.x) * matmul_bf16::tile);
}

}  // namespace

/// 128 threads; grid (ceil(N / 64), ceil(M / 64)).
#define HB_MATMUL(C, name)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_nt_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<false, false>(a, b, bias, c, M, N, K, accumulate);                                                       \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_nn_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<false, true>(a, b, bias, c, M, N, K, accumulate);                                                        \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_tn_bf16_##name(const bf16* a, const bf16* b, const bf16* bias, C* c, int M, int N, int K, int accumulate) { \
    matmul<true, true>(a, b, bias, c, M, N, K, accumulate);                                                         \
  }
HB_MATMUL(bf16, bf16)
HB_MATMUL(float, f32)
