// Matrix products in fp32, beside matmul.cu's in bf16: tensor cores have no fp32 product, and tf32 would round the
// inputs. C[M,N] (+)= A B with A, B as in matmul.cu (nt, nn, tn).
//
// Variant 1: a warp computes 32 x 64, each thread 8 x 8, k in steps of 16 through shared memory, the k index outside. One
// sum per element, k ascending, whatever M and N: a row's bits do not depend on how many rows there are. Rows of shared
// memory are padded to keep 16-byte reads aligned.
#include "common.cuh"

namespace {

constexpr int rows_of_tile = 32, columns_of_tile = 64, step_of_k = 16;

/// Row `at` of the tile of a row-major operand [rows, K] (or [K, rows], transposed), zeros beyond its ends.
template <int rows_here, bool transposed, int pitch>
HB_DEVICE void fetch(float (*to)[pitch], const float* from, int rows, int K, int row0, int k0) {
#pragma unroll
  for (int at = int(threadIdx.x); at < rows_here * step_of_k; at += 32) {
    const int r = transposed ? at % rows_here : at / step_of_k, k = transposed ? at / rows_here : at % step_of_k;
    const bool here = row0 + r < rows && k0 + k < K;
    to[k][r] = here ? from[transposed ? size_t(k0 + k) * rows + row0 + r : size_t(row0 + r) * K + k0 + k] : 0.0f;
  }
}

template <bool transposed_a, bool transposed_b>
HB_DEVICE void matmul(const float* a, const float* b, const float* bias, float* c, int M, int N, int K,
                      int accumulate) {
  __shared__ __align__(16) float as[step_of_k][rows_of_tile + 4], bs[step_of_k][columns_of_tile + 4];
  const int row0 = int(blockIdx.y) * rows_of_tile, column0 = int(blockIdx.x) * columns_of_tile;
  const int my_row = int(threadIdx.x) / 8 * 8, my_column = int(threadIdx.x) % 8 * 8;
  float sum[8][8] = {};
  for (int k0 = 0; k0 < K; k0 += step_of_k) {
    fetch<rows_of_tile, transposed_a>(as, a, M, K, row0, k0);
    fetch<columns_of_tile, transposed_b>(bs, b, N, K, column0, k0);
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < step_of_k; ++k) {
      float x[8], y[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 p = *reinterpret_cast<const float4*>(&as[k][my_row + i]);
        const float4 q = *reinterpret_cast<const float4*>(&bs[k][my_column + i]);
        x[i] = p.x, x[i + 1] = p.y, x[i + 2] = p.z, x[i + 3] = p.w;
        y[i] = q.x, y[i + 1] = q.y, y[i + 2] = q.z, y[i + 3] = q.w;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int r = row0 + my_row + i, n = column0 + my_column + j;
      if (r >= M || n >= N) continue;
      float* to = c + size_t(r) * N + n;
      *to = sum[i][j] + (bias != nullptr ? bias[n] : 0.0f) + (accumulate ? *to : 0.0f);
    }
}

}  // namespace

/// 32 threads; grid (ceil(N / 64), ceil(M / 32)).
#define HB_MATMUL_F32(form, transposed_a, transposed_b)                                                               \
  extern "C" __global__ void __launch_bounds__(32)                                                                    \
      matmul_##form##_f32_f32(const float* a, const float* b, const float* bias, float* c, int M, int N, int K,       \
                              int accumulate) {                                                                       \
    matmul<transposed_a, transposed_b>(a, b, bias, c, M, N, K, accumulate);                                           \
  }
HB_MATMUL_F32(nt, false, false)
HB_MATMUL_F32(nn, false, true)
HB_MATMUL_F32(tn, true, true)
