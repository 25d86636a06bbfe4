// Experts' products in fp32 (grouped.cuh). 32 threads; nt and nn: grid (ceil(columns / 64), ceil(R / 32) + segments + 1);
// tn: grid (ceil(K / 64), E ceil(N / 32)).
#include "grouped.cuh"
#include "matmul_f32.cuh"

using matmul_f32::columns_of_tile;
using matmul_f32::multiply_tile;
using matmul_f32::Rows;
using matmul_f32::rows_of_tile;

extern "C" __global__ void __launch_bounds__(32)
    grouped_matmul_nt_f32(const float* x, const float* w, const int32_t* offsets, const float* bias, float* y, int y_ld,
                          int R, int first, int N, int K, int segments, int experts, int bias_first, int bias_count,
                          int accumulate) {
  float* const behind = accumulate ? nullptr : y;
  grouped_rows(Segments{offsets, first, R}, behind, N, segments, rows_of_tile, columns_of_tile,
               [&](int s, int begin, int rows, int row, int column) {
                 const int e = s % experts;
                 const auto added = [&](int n) {
                   const int j = n - bias_first;
                   return bias != nullptr && j >= 0 && j < bias_count ? bias[size_t(e) * bias_count + j] : 0.0f;
                 };
                 multiply_tile<false, false>(
                     Rows{x + size_t(begin) * K, K}, Rows{w + size_t(e) * N * K, K}, added,
                     [&](int r, int n) { return y + size_t(begin + r) * y_ld + n; }, rows, N, K, accumulate, row, column);
               });
}

extern "C" __global__ void __launch_bounds__(32)
    grouped_matmul_nn_f32(const float* dy, int dy_ld, const float* w, const int32_t* offsets, float* dx, int R,
                          int first, int N, int K, int segments, int experts, int accumulate) {
  float* const behind = accumulate ? nullptr : dx;
  grouped_rows(Segments{offsets, first, R}, behind, K, segments, rows_of_tile, columns_of_tile,
               [&](int s, int begin, int rows, int row, int column) {
                 multiply_tile<false, true>(
                     Rows{dy + size_t(begin) * dy_ld, dy_ld}, Rows{w + size_t(s % experts) * N * K, K},
                     [](int) { return 0.0f; }, [&](int r, int n) { return dx + size_t(begin + r) * K + n; }, rows, K, N,
                     accumulate, row, column);
               });
}

extern "C" __global__ void __launch_bounds__(32)
    grouped_matmul_tn_f32_f32(const float* dy, int dy_ld, const float* x, const int32_t* offsets, float* dw, int R,
                              int first, int N, int K, int segments, int experts, int accumulate) {
  const int tiles = (N + rows_of_tile - 1) / rows_of_tile;
  const int e = blockIdx.y / tiles, row = blockIdx.y % tiles * rows_of_tile;
  const Segments here{offsets, first, R};
  for (int s = e; s < segments; s += experts) {
    const int begin = here[s];
    multiply_tile<true, true>(
        Rows{dy + size_t(begin) * dy_ld, dy_ld}, Rows{x + size_t(begin) * K, K}, [](int) { return 0.0f; },
        [&](int r, int n) { return dw + (size_t(e) * N + r) * K + n; }, N, K, here[s + 1] - begin, s == e ? accumulate : 1, row, int(blockIdx.x) * columns_of_tile);
  }
}

extern "C" __global__ void grouped_bias_f32_f32(const float* dy, const int32_t* offsets, float* db, int R, int first,
                                                int segments, int experts, int N, int first_column, int count,
                                                int accumulate) {
  grouped_bias(dy, Segments{offsets, first, R}, db, segments, experts, N, first_column, count, accumulate);
}
