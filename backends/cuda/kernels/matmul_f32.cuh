// A tile of a matrix product in fp32: of matmul_f32.cu's and grouped_f32.cu's kernels. Tensor cores have no fp32 product,
// and tf32 would round the inputs. The forms are matmul.cu's.
//
// Variant 1: a warp computes 32 x 64, each thread 8 x 8, k in steps of 16 through shared memory, the k index outside. One
// sum per element, k ascending, whatever M and N: a row's bits do not depend on how many rows there are. Rows of shared
// memory are padded to keep 16-byte reads aligned.
#pragma once
#include "common.cuh"

namespace matmul_f32 {

constexpr int rows_of_tile = 32, columns_of_tile = 64, step_of_k = 16;

/// Rows of a matrix, `ld` elements apart. What a tile reads may be another type with the same members, whose rows lie
/// elsewhere.
struct Rows {
  const float* base;
  int ld;
  HB_DEVICE const float* row(int r) const { return base + size_t(r) * ld; }
};

/// Row `at` of the tile of a row-major operand [rows, K] (or [K, rows], transposed), zeros beyond its ends.
template <int rows_here, bool transposed, int pitch, class From>
HB_DEVICE void fetch(float (*to)[pitch], const From& from, int rows, int K, int row0, int k0) {
#pragma unroll
  for (int at = int(threadIdx.x); at < rows_here * step_of_k; at += 32) {
    const int r = transposed ? at % rows_here : at / step_of_k, k = transposed ? at / rows_here : at % step_of_k;
    const bool here = row0 + r < rows && k0 + k < K;
    to[k][r] = !here ? 0.0f : transposed ? from.row(k0 + k)[row0 + r] : from.row(row0 + r)[k0 + k];
  }
}

/// Rows [row0, …) and columns [column0, …) of C, by a warp; it has read what is in shared memory when it returns.
/// bias(n): what is added to column n; to(r, n): where an element of C goes. a, b: rows as they lie, transposed or not.
template <bool transposed_a, bool transposed_b, class A, class B, class Bias, class To>
HB_DEVICE void multiply_tile(const A& a, const B& b, Bias bias, To to, int M, int N, int K, int accumulate, int row0,
                             int column0) {
  __shared__ __align__(16) float as[step_of_k][rows_of_tile + 4], bs[step_of_k][columns_of_tile + 4];
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
      float* at = to(r, n);
      *at = sum[i][j] + bias(n) + (accumulate ? *at : 0.0f);
    }
}

}  // namespace matmul_f32
