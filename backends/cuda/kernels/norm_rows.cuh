// Backward of norms over rows, in one pass: a block takes the rows of a part one after another, writes their gradients
// and keeps the sums for the weight's gradient meanwhile, so dy and x come from memory once. column_sums
// (elementwise.cu) adds the parts up. A column's sum runs over rows in order, in fp32: parts are short
// (launch_operands.h).
#pragma once
#include "common.cuh"

/// Columns of a row that a thread holds in registers: i, i + threads, …; of rows of up to 1,024 times as many all.
constexpr int held = 8;

template <class Visit>
HB_DEVICE void held_columns(int H, Visit visit) {
#pragma unroll
  for (int k = 0; k < held; ++k) {
    const int j = threadIdx.x + k * blockDim.x;
    if (j < H) visit(j, k);
  }
}
template <class Visit>
HB_DEVICE void further_columns(int H, Visit visit) {
  for (int j = threadIdx.x + held * blockDim.x; j < H; j += blockDim.x) visit(j);
}
/// The sum of a column that nobody holds is kept in its part.
HB_DEVICE void add_to_part(float* part, int j, bool first, float x) {
  if (part != nullptr) part[j] = first ? x : part[j] + x;
}

/// What a block of rms_norm's backward works on: rows begin to end of dy, and of x and dx, H columns of each; dx may be
/// dy. part: H sums; nullptr where the weight is frozen.
template <class E>
struct NormRows {
  const E *dy, *x, *w;
  const float* rstd;
  E* dx;
  float* part;
  int begin, end, H, ld_dy, ld_x;
};

/// dx (+)= rstd (dy w - x rstd^2 mean(dy w x)), w being w + offset; part[j] = sum of dy x rstd. `shared`: 32 floats.
template <class E>
HB_DEVICE void rms_norm_rows(const NormRows<E>& in, float offset, int accumulate, float* shared) {
  float sums[held] = {};
  for (int t = in.begin; t < in.end; ++t) {
    const E *dy = in.dy + size_t(t) * in.ld_dy, *x = in.x + size_t(t) * in.ld_x;
    E* dx = in.dx + size_t(t) * in.ld_x;
    float g[held], v[held], was[held], dot = 0;
    held_columns(in.H, [&](int j, int k) {
      g[k] = load(dy + j), v[k] = load(x + j);
      was[k] = accumulate ? load(dx + j) : 0.0f;
    });
    held_columns(in.H, [&](int j, int k) { dot += g[k] * (load(in.w + j) + offset) * v[k]; });
    further_columns(in.H, [&](int j) { dot += load(dy + j) * (load(in.w + j) + offset) * load(x + j); });
    const float r = in.rstd[t], c = block_sum(dot, shared) / float(in.H) * r * r * r;
    held_columns(in.H, [&](int j, int k) {
      sums[k] += g[k] * v[k] * r;
      store(dx + j, g[k] * (load(in.w + j) + offset) * r - v[k] * c + was[k]);
    });
    further_columns(in.H, [&](int j) {
      const float of_y = load(dy + j), of_x = load(x + j);
      add_to_part(in.part, j, t == in.begin, of_y * of_x * r);
      const float d = of_y * (load(in.w + j) + offset) * r - of_x * c;
      store(dx + j, accumulate ? d + load(dx + j) : d);
    });
  }
  if (in.part != nullptr) held_columns(in.H, [&](int j, int k) { in.part[j] = sums[k]; });
}
