// Experts' products in bf16 (grouped.cuh). 128 threads; nt and nn: grid (ceil(columns / 64), ceil(R / 64) + segments + 1);
// tn: grid (ceil(K / 64), E ceil(N / 64)).
#include "grouped.cuh"
#include "matmul.cuh"

using matmul_bf16::add_products;
using matmul_bf16::multiply_tile;
using matmul_bf16::Rows;
using matmul_bf16::store_tile;
using matmul_bf16::Sums;
using matmul_bf16::tile;

extern "C" __global__ void __launch_bounds__(128)
    grouped_matmul_nt_bf16(const bf16* x, const bf16* w, const int32_t* offsets, const bf16* bias, bf16* y, int y_ld,
                           int R, int first, int N, int K, int segments, int experts, int bias_first, int bias_count,
                           int accumulate) {
  bf16* const behind = accumulate ? nullptr : y;
  grouped_rows(Segments{offsets, first, R}, behind, N, segments, tile, tile, [&](int s, int begin, int rows, int row, int column) {
    const int e = s % experts;
    const auto added = [&](int n) {
      const int j = n - bias_first;
      return bias != nullptr && j >= 0 && j < bias_count ? load(bias + size_t(e) * bias_count + j) : 0.0f;
    };
    multiply_tile<false, false>(
        Rows{x + size_t(begin) * K, K}, Rows{w + size_t(e) * N * K, K}, added,
        [&](int r, int n) { return y + size_t(begin + r) * y_ld + n; }, rows, N, K, accumulate, row, column);
  });
}

extern "C" __global__ void __launch_bounds__(128)
    grouped_matmul_nn_bf16(const bf16* dy, int dy_ld, const bf16* w, const int32_t* offsets, bf16* dx, int R,
                           int first, int N, int K, int segments, int experts, int accumulate) {
  bf16* const behind = accumulate ? nullptr : dx;
  grouped_rows(Segments{offsets, first, R}, behind, K, segments, tile, tile, [&](int s, int begin, int rows, int row, int column) {
    multiply_tile<false, true>(
        Rows{dy + size_t(begin) * dy_ld, dy_ld}, Rows{w + size_t(s % experts) * N * K, K}, [](int) { return 0.0f; },
        [&](int r, int n) { return dx + size_t(begin + r) * K + n; }, rows, K, N, accumulate, row, column);
  });
}

namespace {

/// Of an expert's rows in all segments one sum, rounded once.
template <class G>
HB_DEVICE void weight_gradient(const bf16* dy, int dy_ld, const bf16* x, const int32_t* offsets, G* dw, int R, int first,
                               int N, int K, int segments, int experts, int accumulate) {
  const int tiles = (N + tile - 1) / tile, e = blockIdx.y / tiles;
  const int row = blockIdx.y % tiles * tile, column = int(blockIdx.x) * tile;
  const Segments here{offsets, first, R};
  Sums sums;
  for (int s = e; s < segments; s += experts) {
    const int begin = here[s];
    add_products<true, true>(sums, Rows{dy + size_t(begin) * dy_ld, dy_ld}, Rows{x + size_t(begin) * K, K}, N, K,
                             here[s + 1] - begin, row, column);
  }
  store_tile(
      sums, [](int) { return 0.0f; }, [&](int r, int n) { return dw + (size_t(e) * N + r) * K + n; }, N, K, accumulate,
      row, column);
}

}  // namespace

/// Gradients of weights, named by the dtypes of activations and gradients.
#define HB_GROUPED_GRADIENTS(G, name)                                                                                  \
  extern "C" __global__ void __launch_bounds__(128)                                                                    \
      grouped_matmul_tn_bf16_##name(const bf16* dy, int dy_ld, const bf16* x, const int32_t* offsets, G* dw, int R,    \
                                    int first, int N, int K, int segments, int experts, int accumulate) {              \
    weight_gradient(dy, dy_ld, x, offsets, dw, R, first, N, K, segments, experts, accumulate);                         \
  }                                                                                                                    \
  extern "C" __global__ void grouped_bias_bf16_##name(const bf16* dy, const int32_t* offsets, G* db, int R, int first, \
                                                      int segments, int experts, int N, int first_column, int count,   \
                                                      int accumulate) {                                                \
    grouped_bias(dy, Segments{offsets, first, R}, db, segments, experts, N, first_column, count, accumulate);          \
  }
HB_GROUPED_GRADIENTS(float, f32)
HB_GROUPED_GRADIENTS(bf16, bf16)
