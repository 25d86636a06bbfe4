// Small fp32 GEMM on tiles that lie in L1/L2, for attention. Internal to the kernels.
#pragma once
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

inline constexpr int kTileVecs = 2;                      // vectors of C per row of the register tile
inline constexpr int kPanel = kTileVecs * kLanes;        // columns of C per register tile
inline constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // 24 or 12 accumulators of the 32 or 16 registers

/// c[MR, NV vectors] (+)= a·b, where a(m,k) = a[m·a_row + k·a_col] is broadcast and b(k,·) = b + k·ldb are vectors.
template <int MR, int NV>
HB_INLINE void gemm_tile(std::int64_t K, const float* a, std::int64_t a_row, std::int64_t a_col, const float* b,
                         std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  Vf acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[m][v] = accumulate ? load(c + m * ldc + v * kLanes) : Vf{};
  for (std::int64_t k = 0; k < K; ++k) {
    Vf bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const Vf am = splat(a[m * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] += am * bv[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + m * ldc + v * kLanes, acc[m][v]);
}

template <int NV>
void gemm_rows(std::int64_t M, std::int64_t K, const float* a, std::int64_t a_row, std::int64_t a_col, const float* b,
               std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  std::int64_t m = 0;
  for (; m + kTileRows <= M; m += kTileRows)
    gemm_tile<kTileRows, NV>(K, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, accumulate);
  for (; m + 4 <= M; m += 4) gemm_tile<4, NV>(K, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, accumulate);
  for (; m < M; ++m) gemm_tile<1, NV>(K, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, accumulate);
}

/// c[M,N] (+)= a[M,K] · b[K,N]; a through its two strides (so also transposed), b and c row-major with N a multiple of
/// kLanes. Every element is one chain of multiply-adds over ascending k, whatever M, N and the tile it falls in.
inline void gemm_small(std::int64_t M, std::int64_t N, std::int64_t K, const float* a, std::int64_t a_row,
                       std::int64_t a_col, const float* b, std::int64_t ldb, float* c, std::int64_t ldc,
                       bool accumulate) {
  std::int64_t n = 0;
  constexpr int kWideVecs = 4;  // a row alone has its chains side by side in columns only
  for (; M < 4 && n + kWideVecs * kLanes <= N; n += kWideVecs * kLanes)
    for (std::int64_t m = 0; m < M; ++m)
      gemm_tile<1, kWideVecs>(K, a + m * a_row, a_row, a_col, b + n, ldb, c + m * ldc + n, ldc, accumulate);
  for (; n + kPanel <= N; n += kPanel) gemm_rows<kTileVecs>(M, K, a, a_row, a_col, b + n, ldb, c + n, ldc, accumulate);
  for (; n < N; n += kLanes) gemm_rows<1>(M, K, a, a_row, a_col, b + n, ldb, c + n, ldc, accumulate);
}

}  // namespace hotbunk::kernels
