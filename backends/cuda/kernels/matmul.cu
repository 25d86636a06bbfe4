// Matrix products on mma.sync, the fallback and the oracle of cuBLASLt. C[M,N] (+)= A B with
//   nt: A[M,K] row-major, B[N,K] row-major   (linear: x w^T)
//   nn: A[M,K], B[K,N]                       (linear_dgrad: dy w)
//   tn: A[K,M], B[K,N]                       (linear_wgrad: dy^T x)
// Rows of A, as it lies, are lda elements apart, those of C ldc: both may be columns of wider matrices. How a tile is
// formed: matmul.cuh.
#include "matmul.cuh"

namespace {

template <bool transposed_a, bool transposed_b, class C>
HB_DEVICE void matmul(const bf16* a, int lda, const bf16* b, const bf16* bias, C* c, int ldc, int M, int N, int K,
                      int accumulate) {
  matmul_bf16::multiply_tile<transposed_a, transposed_b>(
      matmul_bf16::Rows{a, lda}, matmul_bf16::Rows{b, transposed_b ? N : K},
      [&](int n) { return bias != nullptr ? load(bias + n) : 0.0f; },
      [&](int r, int n) { return c + size_t(r) * ldc + n; }, M, N, K, accumulate,
      int(blockIdx.y) * matmul_bf16::tile, int(blockIdx.x) * matmul_bf16::tile);
}

}  // namespace

/// 128 threads; grid (ceil(N / 64), ceil(M / 64)).
#define HB_MATMUL_FORM(form, transposed_a, transposed_b, C, name)                                                   \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      matmul_##form##_bf16_##name(const bf16* a, int lda, const bf16* b, const bf16* bias, C* c, int ldc, int M,    \
                                  int N, int K, int accumulate) {                                                   \
    matmul<transposed_a, transposed_b>(a, lda, b, bias, c, ldc, M, N, K, accumulate);                               \
  }
#define HB_MATMUL(C, name)                          \
  HB_MATMUL_FORM(nt, false, false, C, name)         \
  HB_MATMUL_FORM(nn, false, true, C, name)          \
  HB_MATMUL_FORM(tn, true, true, C, name)
HB_MATMUL(bf16, bf16)
HB_MATMUL(float, f32)
