// Products x w^T of rows that are 16-byte aligned, in bf16 on mma.sync: variant 2 of matmul.cu's form nt, which
// training's forward passes, prefill and decode share. A tile's shape follows the number of rows and columns; an
// element's sum does not: one chain of mma over k in steps of 16 from zero, in every variant. So a row's bits depend
// neither on how many rows there are nor on which tile it stands in (P5).
//
// Loads run several stages ahead by cp.async into at most 48 KB, which every GPU gives a block unasked. Chunks of 16
// bytes are swizzled: the eight rows that ldmatrix reads at once lie in different groups of four banks.
#include "mma.cuh"

namespace {

/// Where chunk `chunk` of a stage's row lies, in elements. Rows of 64 bytes meet their banks again every second row,
/// rows of 128 bytes and more in each.
template <int step>
HB_DEVICE int swizzled(int row, int chunk) {
  const int turned = step == 32 ? chunk ^ (row >> 1 & 3) : (chunk & ~7) | ((chunk ^ row) & 7);
  return row * step + turned * 8;
}

/// Rows [row0, row0 + count) and columns [k0, k0 + step) of a row-major matrix [rows, K], zeros beyond its ends.
template <int count, int step, int threads>
HB_DEVICE void fetch(bf16* to, const bf16* from, int ld, int rows, int K, int row0, int k0) {
  constexpr int chunks = step / 8;
  static_assert(count * chunks % threads == 0);
#pragma unroll
  for (int i = 0; i < count * chunks / threads; ++i) {
    const int at = i * threads + int(threadIdx.x), r = at / chunks, c = at % chunks;
    const bool here = row0 + r < rows && k0 + 8 * c < K;
    copy_async(to + swizzled<step>(r, c), here ? from + size_t(row0 + r) * ld + k0 + 8 * c : from, here ? 16 : 0);
  }
}

HB_DEVICE void store_pair(bf16* to, float x, float y) { *reinterpret_cast<uint32_t*>(to) = packed(x, y); }
HB_DEVICE void store_pair(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

/// C[M,N] (+)= A[M,K] B[N,K]^T + bias in a tile of rows x columns; a warp forms warp_rows x warp_columns of it.
template <int rows, int columns, int step, int stages, int warp_rows, int warp_columns, class C>
HB_DEVICE void multiply_nt(const bf16* a, int lda, const bf16* b, const bf16* bias, C* c, int ldc, int M, int N, int K,
                           int accumulate) {
  constexpr int warps_across = columns / warp_columns, threads = rows / warp_rows * warps_across * 32;
  __shared__ __align__(128) bf16 as[stages][rows * step], bs[stages][columns * step];
  const int lane = threadIdx.x & 31, warp = int(threadIdx.x) >> 5;
  const int warp_row = warp / warps_across * warp_rows, warp_column = warp % warps_across * warp_columns;
  // Blocks that run together share rows of A and of B: eight rows of tiles, column by column.
  const int tiles_down = (M + rows - 1) / rows, tiles_across = (N + columns - 1) / columns;
  constexpr int most_down = 8;
  const int group = int(blockIdx.x) / (most_down * tiles_across), first = group * most_down;
  const int down = min(tiles_down - first, most_down), in_group = int(blockIdx.x) % (most_down * tiles_across);
  const int row0 = (first + in_group % down) * rows, column0 = in_group / down * columns;

  float sums[warp_rows / 16][warp_columns / 8][4] = {};
  const int steps = (K + step - 1) / step;
  const auto bring = [&](int stage, int s) {
    if (s < steps) {
      fetch<rows, step, threads>(as[stage], a, lda, M, K, row0, s * step);
      fetch<columns, step, threads>(bs[stage], b, K, N, K, column0, s * step);
    }
    commit();
  };
#pragma unroll
  for (int s = 0; s < stages - 1; ++s) bring(s, s);
  int stage = 0, next = stages - 1;
  for (int s = 0; s < steps; ++s) {
    wait_for_copies<stages - 2>();
    __syncthreads();
    bring(next, s + stages - 1);  // where step s - 1 was, which all have read
#pragma unroll
    for (int k = 0; k < step; k += 32) {
      uint32_t fa[2][warp_rows / 16][4], fb[warp_columns / 8][4];
#pragma unroll
      for (int j = 0; j < warp_columns / 8; ++j)
        load_matrix(fb[j], bs[stage] + swizzled<step>(warp_column + 8 * j + lane % 8, k / 8 + lane / 8));
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < warp_rows / 16; ++i)
          load_matrix(fa[h][i], as[stage] + swizzled<step>(warp_row + 16 * i + lane % 16, k / 8 + 2 * h + lane / 16));
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < warp_rows / 16; ++i)
#pragma unroll
          for (int j = 0; j < warp_columns / 8; ++j) multiply(sums[i][j], fa[h][i], fb[j][2 * h], fb[j][2 * h + 1]);
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
    next = next + 1 == stages ? 0 : next + 1;
  }

  const bool pairs = (ldc & 1) == 0 && reinterpret_cast<uintptr_t>(c) % (2 * sizeof(C)) == 0;
#pragma unroll
  for (int i = 0; i < warp_rows / 16; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + warp_row + 16 * i + lane / 4 + 8 * h;
      if (r >= M) continue;
#pragma unroll
      for (int j = 0; j < warp_columns / 8; ++j) {
        const int n = column0 + warp_column + 8 * j + lane % 4 * 2;
        C* to = c + size_t(r) * ldc + n;
        float x[2] = {sums[i][j][2 * h], sums[i][j][2 * h + 1]};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n + e >= N) break;
          x[e] += bias != nullptr ? load(bias + n + e) : 0.0f;
          if (accumulate) x[e] += load(to + e);
        }
        if (pairs && n + 1 < N) {
          store_pair(to, x[0], x[1]);
          continue;
        }
        if (n < N) store(to, x[0]);
        if (n + 1 < N) store(to + 1, x[1]);
      }
    }
}

}  // namespace

/// 128 threads; grid (ceil(M / rows) * ceil(N / columns)). K and lda are multiples of 8, a and b 16-byte aligned. Named
/// by the tile: 32 rows of a decode step, whose weights stream through many narrow tiles; 64 and 128 of more rows.
#define HB_MATMUL_NT(rows, columns, step, stages, warp_rows, warp_columns, blocks, C, name)                          \
  extern "C" __global__ void __launch_bounds__(128, blocks) matmul_nt_bf16_##name##_##rows##x##columns(              \
      const bf16* a, int lda, const bf16* b, const bf16* bias, C* c, int ldc, int M, int N, int K, int accumulate) { \
    multiply_nt<rows, columns, step, stages, warp_rows, warp_columns>(a, lda, b, bias, c, ldc, M, N, K, accumulate); \
  }
#define HB_MATMUL_NT_TILES(C, name)               \
  HB_MATMUL_NT(32, 16, 128, 4, 16, 8, 4, C, name) \
  HB_MATMUL_NT(64, 32, 64, 4, 32, 16, 4, C, name) \
  HB_MATMUL_NT(64, 64, 64, 3, 32, 32, 4, C, name) \
  HB_MATMUL_NT(128, 128, 32, 3, 64, 64, 2, C, name)
HB_MATMUL_NT_TILES(bf16, bf16)
HB_MATMUL_NT_TILES(float, f32)
