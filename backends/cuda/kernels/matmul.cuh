// A tile of a matrix product in bf16 on mma.sync: of matmul.cu's and grouped.cu's kernels. The forms are matmul.cu's.
//
// bf16 in, fp32 sums, a fixed order of k whatever M and N: a row's bits do not depend on how many rows there are.
// A block of 4 warps computes 64 x 64, k in steps of 64 through shared memory, two stages by cp.async where rows are
// 16-byte aligned and plain loads elsewhere. Rows of a stage are padded to 72 elements: the 144 bytes of a row move the
// next one by one group of four banks, so that neither ldmatrix nor the copies meet a bank twice.
#pragma once
#include "mma.cuh"

namespace matmul_bf16 {

constexpr int tile = 64, step = 64, pitch = step + 8;

/// Rows of a matrix, `ld` elements apart. What a tile reads may be another type with the same members, whose rows lie
/// elsewhere.
struct Rows {
  const bf16* base;
  int ld;
  HB_DEVICE const bf16* row(int r) const { return base + size_t(r) * ld; }
};

/// Brings rows [row0, row0 + tile) and columns [k0, k0 + step) of a row-major matrix [rows, K] to shared memory, zeros
/// beyond its ends.
template <class From>
HB_DEVICE void fetch(bf16 (*to)[pitch], const From& from, int rows, int K, int row0, int k0, bool wide) {
  if (wide) {
    for (int at = threadIdx.x; at < tile * step / 8; at += blockDim.x) {
      const int r = at / (step / 8), c = at % (step / 8) * 8;
      const bool here = row0 + r < rows && k0 + c < K;
      copy_async(&to[r][c], here ? from.row(row0 + r) + k0 + c : from.base, here ? 16 : 0);
    }
    return;
  }
  for (int at = threadIdx.x; at < tile * step; at += blockDim.x) {
    const int r = at / step, c = at % step;
    const bool here = row0 + r < rows && k0 + c < K;
    to[r][c] = here ? from.row(row0 + r)[k0 + c] : bf16(0.0f);
  }
}

/// The same of a matrix [K, rows], transposed on the way.
template <class From>
HB_DEVICE void fetch_transposed(bf16 (*to)[pitch], const From& from, int rows, int K, int row0, int k0) {
  for (int at = threadIdx.x; at < tile * step; at += blockDim.x) {
    const int c = at / tile, r = at % tile;
    const bool here = row0 + r < rows && k0 + c < K;
    to[r][c] = here ? from.row(k0 + c)[row0 + r] : bf16(0.0f);
  }
}

/// A thread's part of a tile, of zeros.
struct Sums {
  float of[2][4][4] = {};
};

/// Adds A B in rows [row0, row0 + tile) and columns [column0, column0 + tile), by the 128 threads of a block; all have
/// read what is in shared memory when it returns. a, b: rows as they lie, transposed or not.
template <bool transposed_a, bool transposed_b, class A, class B>
HB_DEVICE void add_products(Sums& sums, const A& a, const B& b, int M, int N, int K, int row0, int column0) {
  __shared__ __align__(16) bf16 as[2][tile][pitch], bs[2][tile][pitch];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  // A parameter inside a gathered unit begins at any element.
  const bool wide = (K | a.ld | b.ld) % 8 == 0 &&
                    (reinterpret_cast<uintptr_t>(a.base) | reinterpret_cast<uintptr_t>(b.base)) % 16 == 0;
  const auto bring = [&](int stage, int k0) {
    if (transposed_a) fetch_transposed(as[stage], a, M, K, row0, k0);
    else fetch(as[stage], a, M, K, row0, k0, wide);
    if (transposed_b) fetch_transposed(bs[stage], b, N, K, column0, k0);
    else fetch(bs[stage], b, N, K, column0, k0, wide);
    commit();
  };
  const int steps = (K + step - 1) / step;
  if (steps > 0) bring(0, 0);
  for (int s = 0; s < steps; ++s) {
    if (s + 1 < steps) bring((s + 1) & 1, (s + 1) * step);
    else commit();
    wait_for_copies<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < step; k += 16) {
      uint32_t fa[2][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrix(fa[i], &as[s & 1][warp_row + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_matrix(fb[j], &bs[s & 1][warp_column + 16 * j + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sums.of[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
    __syncthreads();
  }
}

/// Where the tile's sums go: bias(n) is added to column n, to(r, n) is where an element of C lies.
template <class Bias, class To>
HB_DEVICE void store_tile(const Sums& sums, Bias bias, To to, int M, int N, int accumulate, int row0, int column0) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row0 + warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int n = column0 + warp_column + 8 * j + lane % 4 * 2 + e % 2;
        if (r >= M || n >= N) continue;
        float x = sums.of[i][j][e] + bias(n);
        const auto at = to(r, n);
        if (accumulate) x += load(at);
        store(at, x);
      }
}

/// That tile of C (+)= A B + bias.
template <bool transposed_a, bool transposed_b, class A, class B, class Bias, class To>
HB_DEVICE void multiply_tile(const A& a, const B& b, Bias bias, To to, int M, int N, int K, int accumulate, int row0,
                             int column0) {
  Sums sums;
  add_products<transposed_a, transposed_b>(sums, a, b, M, N, K, row0, column0);
  store_tile(sums, bias, to, M, N, accumulate, row0, column0);
}

}  // namespace matmul_bf16
