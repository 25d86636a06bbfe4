// Products of experts' rows by their matrices, of one kernel each: rows lie sorted by expert, offsets[s] … offsets[s + 1]
// of them in segment s, of expert s % E (several segments for each expert where rows came from several ranks). Of these
// rows R are here, from the `first` on: all, or those of a round in which they came.
//   nt: y[R,N] (+)= x[R,K] w[E N,K]^T + bias  (grouped_linear; lora_down, lora_up)
//   nn: dx[R,K] (+)= dy[R,N] w                (grouped_linear_dgrad; lora_up_dgrad)
//   tn: dw[E N,K] (+)= dy^T x                 (grouped_linear_wgrad; lora_up_wgrad)
// y and dy may be columns of a wider activation, whose rows are y_ld or dy_ld apart. A block forms one tile, of rows of
// one expert; rows behind the last expert's become zeros, or stay where a product is added. The tiles are the dense
// products' (matmul.cuh, matmul_f32.cuh), so a row's bits do not depend on which other rows there are.
#pragma once
#include "common.cuh"

/// Where segments begin among the rows that are here.
struct Segments {
  const int32_t* offsets;
  int first, R;
  HB_DEVICE int operator[](int s) const { return max(0, min(offsets[s] - first, R)); }
};

/// The tile of the nt and nn forms at block (x, y): grid (columns / columns_each, a bound of rows' tiles).
/// `multiply(segment, first row, rows, row in it, column)` forms it. Rows behind the last expert's become zeros in c;
/// null: they stay.
template <class E, class Multiply>
HB_DEVICE void grouped_rows(const Segments& offsets, E* c, int columns, int segments, int rows_each, int columns_each,
                            Multiply multiply) {
  int row;
  const int R = offsets.R;
  const auto size = [&](int s) { return s < segments ? offsets[s + 1] - offsets[s] : R - offsets[segments]; };
  const int s = segment_of_tile(int(blockIdx.y), segments + 1, rows_each, size, row), column = blockIdx.x * columns_each;
  if (s < 0) return;
  if (s < segments) return multiply(s, offsets[s], offsets[s + 1] - offsets[s], row, column);
  if (c == nullptr) return;
  for (int at = threadIdx.x; at < rows_each * columns_each; at += blockDim.x) {
    const int r = offsets[segments] + row + at / columns_each, n = column + at % columns_each;
    if (r < R && n < columns) store(c + size_t(r) * columns + n, 0.0f);
  }
}

/// db[e, j] (+)= sums of columns [first, first + count) of dy over the expert's rows: a thread a column, rows in order,
/// fp64 inside.
template <class E, class G>
HB_DEVICE void grouped_bias(const E* dy, const Segments& offsets, G* db, int segments, int experts, int N, int first,
                            int count, int accumulate) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, e = blockIdx.y;
  if (j >= count) return;
  G* to = db + size_t(e) * count + j;
  double sum = accumulate ? load(to) : 0.0;
  for (int s = e; s < segments; s += experts)
    for (int r = offsets[s]; r < offsets[s + 1]; ++r) sum += load(dy + size_t(r) * N + first + j);
  store(to, float(sum));
}
