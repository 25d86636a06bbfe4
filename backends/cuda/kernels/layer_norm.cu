// layer_norm and the fused residual sum: one block per row of T. Backward: one block per part of `each` rows
// (norm_rows.cuh). Shapes as in graph/catalogue.h.
#include "norm_rows.cuh"

namespace {

template <class E>
HB_DEVICE float mean_of(const E* row, int H, float* part) {
  float sum = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) sum += load(row + j);
  return block_sum(sum, part) / float(H);
}

/// y[t,:] = (x[t,:] - mean) rstd[t] w + b, rstd[t] = 1 / sqrt(mean((x[t,:] - mean)^2) + eps). With `residual`, x is
/// first x + residual and that sum, rounded to E, goes to `sum`.
template <class E>
HB_DEVICE void layer_norm(const E* x, const E* residual, const E* w, const E* b, E* y, float* rstd, E* sum, int H,
                          float eps) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  if (residual != nullptr)  // each thread reads again what it wrote
    for (int j = threadIdx.x; j < H; j += blockDim.x)
      store(sum + row + j, load(x + row + j) + load(residual + row + j));
  const E* from = (residual != nullptr ? sum : x) + row;
  const float mean = mean_of(from, H, part);
  float squares = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    const float v = load(from + j) - mean;
    squares += v * v;
  }
  const float r = rsqrtf(block_sum(squares, part) / float(H) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
  for (int j = threadIdx.x; j < H; j += blockDim.x)
    store(y + row + j, (load(from + j) - mean) * r * load(w + j) + load(b + j));
}

/// With n = (x - mean) rstd: dx (+)= rstd (dy w - mean(dy w) - n mean(dy w n)); dx may be dy. of_w[j] = sum of dy n,
/// of_b = of dy; `in.part` is of_w. `shared`: 32 floats.
template <class E>
HB_DEVICE void layer_norm_rows(const NormRows<E>& in, float* of_b, int accumulate, float* shared) {
  float w_sums[held] = {}, b_sums[held] = {};
  const int H = in.H;
  for (int t = in.begin; t < in.end; ++t) {
    const E *dy = in.dy + size_t(t) * H, *x = in.x + size_t(t) * H;
    E* dx = in.dx + size_t(t) * H;
    float g[held], v[held], of_x = 0, sum = 0, dot = 0;
    held_columns(H, [&](int j, int k) { g[k] = load(dy + j), v[k] = load(x + j); });
    held_columns(H, [&](int, int k) { of_x += v[k]; });
    further_columns(H, [&](int j) { of_x += load(x + j); });
    const float mean = block_sum(of_x, shared) / float(H), r = in.rstd[t];
    held_columns(H, [&](int j, int k) {
      const float of_y = g[k] * load(in.w + j);
      sum += of_y, dot += of_y * (v[k] - mean);
    });
    further_columns(H, [&](int j) {
      const float of_y = load(dy + j) * load(in.w + j);
      sum += of_y, dot += of_y * (load(x + j) - mean);
    });
    const float of_mean = block_sum(sum, shared) / float(H), of_deviation = block_sum(dot, shared) / float(H) * r;
    held_columns(H, [&](int j, int k) {
      const float normed = (v[k] - mean) * r;
      w_sums[k] += g[k] * normed, b_sums[k] += g[k];
      const float d = (g[k] * load(in.w + j) - of_mean - normed * of_deviation) * r;
      store(dx + j, accumulate ? d + load(dx + j) : d);
    });
    further_columns(H, [&](int j) {
      const float of_y = load(dy + j), normed = (load(x + j) - mean) * r;
      add_to_part(in.part, j, t == in.begin, of_y * normed);
      add_to_part(of_b, j, t == in.begin, of_y);
      const float d = (of_y * load(in.w + j) - of_mean - normed * of_deviation) * r;
      store(dx + j, accumulate ? d + load(dx + j) : d);
    });
  }
  held_columns(H, [&](int j, int k) { in.part[j] = w_sums[k], of_b[j] = b_sums[k]; });
}

}  // namespace

#define HB_LAYER_NORM(E, name)                                                                                         \
  extern "C" __global__ void layer_norm_##name(const E* x, const E* residual, const E* w, const E* b, E* y,            \
                                               float* rstd, E* sum, int H, float eps) {                                \
    layer_norm(x, residual, w, b, y, rstd, sum, H, eps);                                                               \
  }                                                                                                                    \
  /* parts: of dw, [blocks, H], and behind them of db. */                                                              \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      layer_norm_backward_##name(const E* dy, const E* x, const E* w, const float* rstd, E* dx, float* parts, int T,   \
                                 int H, int each, int accumulate) {                                                    \
    __shared__ float shared[32];                                                                                       \
    const int begin = blockIdx.x * each;                                                                               \
    float* of_w = parts + size_t(blockIdx.x) * H;                                                                      \
    layer_norm_rows<E>({dy, x, w, rstd, dx, of_w, begin, min(begin + each, T), H, H, H}, of_w + size_t(gridDim.x) * H, \
                       accumulate, shared);                                                                            \
  }
HB_LAYER_NORM(float, f32)
HB_LAYER_NORM(bf16, bf16)
