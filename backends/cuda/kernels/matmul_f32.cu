// Matrix products in fp32, beside matmul.cu's in bf16, in the same forms. How a tile is formed: matmul_f32.cuh.
#include "matmul_f32.cuh"

namespace {

template <bool transposed_a, bool transposed_b>
HB_DEVICE void matmul(const float* a, int lda, const float* b, const float* bias, float* c, int ldc, int M, int N, int K,
                      int accumulate) {
  matmul_f32::multiply_tile<transposed_a, transposed_b>(
      matmul_f32::Rows{a, lda}, matmul_f32::Rows{b, transposed_b ? N : K},
      [&](int n) { return bias != nullptr ? bias[n] : 0.0f; }, [&](int r, int n) { return c + size_t(r) * ldc + n; }, M, N,
      K, accumulate,
      int(blockIdx.y) * matmul_f32::rows_of_tile, int(blockIdx.x) * matmul_f32::columns_of_tile);
}

}  // namespace

/// 32 threads, 16 blocks on an SM, which leaves them the registers that they want; grid (ceil(N / 64), ceil(M / 32)).
#define HB_MATMUL_F32(form, transposed_a, transposed_b)                                                               \
  extern "C" __global__ void __launch_bounds__(32, 16)                                                                    \
      matmul_##form##_f32_f32(const float* a, int lda, const float* b, const float* bias, float* c, int ldc, int M,   \
                              int N, int K, int accumulate) {                                                         \
    matmul<transposed_a, transposed_b>(a, lda, b, bias, c, ldc, M, N, K, accumulate);                                 \
  }
HB_MATMUL_F32(nt, false, false)
HB_MATMUL_F32(nn, false, true)
HB_MATMUL_F32(tn, true, true)
