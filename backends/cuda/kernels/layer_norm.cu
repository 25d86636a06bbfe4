// layer_norm, its backward, and the fused residual sum: one block per row of T. Shapes as in graph/catalogue.h.
#include "common.cuh"

namespace {

template <class E>
HB_DEVICE float mean_of(const E* row, int H, float* part) {
  float sum = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) sum += load(row + j);
  return block_sum(sum, part) / float(H);
}

/// y[t,:] = (x[t,:] - mean) rstd[t] w + b, rstd[t] = 1 / sqrt(mean((x[t,:] - mean)^2) + eps). With `residual`, x is first
/// x + residual and that sum, rounded to E, goes to `sum`.
template <class E>
HB_DEVICE void layer_norm(const E* x, const E* residual, const E* w, const E* b, E* y, float* rstd, E* sum, int H,
                          float eps) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  if (residual != nullptr)  // each thread reads again what it wrote
    for (int j = threadIdx.x; j < H; j += blockDim.x) store(sum + row + j, load(x + row + j) + load(residual + row + j));
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

/// With n = (x - mean) rstd: dx (+)= rstd (dy w - mean(dy w) - n mean(dy w n)).
template <class E>
HB_DEVICE void layer_norm_backward(const E* dy, const E* x, const E* w, const float* rstd, E* dx, int H,
                                   int accumulate) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  const float mean = mean_of(x + row, H, part), r = rstd[blockIdx.x];
  float sum = 0, dot = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    const float g = load(dy + row + j) * load(w + j);
    sum += g, dot += g * (load(x + row + j) - mean);
  }
  const float of_mean = block_sum(sum, part) / float(H), of_deviation = block_sum(dot, part) / float(H) * r;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    const float normed = (load(x + row + j) - mean) * r;
    float g = (load(dy + row + j) * load(w + j) - of_mean - normed * of_deviation) * r;
    if (accumulate) g += load(dx + row + j);
    store(dx + row + j, g);
  }
}

/// Parts of dw, [blocks y, H], and behind them of db, of `each` rows: sums over t of dy (x - mean) rstd, and of dy; a
/// thread per column, tokens in order, fp64 inside.
template <class E>
HB_DEVICE void layer_norm_weight(const E* dy, const E* x, const float* means, const float* rstd, float* parts, int T,
                                 int H, int each) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, begin = blockIdx.y * each, end = min(begin + each, T);
  if (j >= H) return;
  double of_w = 0, of_b = 0;
  for (int t = begin; t < end; ++t) {
    const float g = load(dy + size_t(t) * H + j);
    of_w += g * (load(x + size_t(t) * H + j) - means[t]) * rstd[t];
    of_b += g;
  }
  parts[size_t(blockIdx.y) * H + j] = float(of_w);
  parts[size_t(gridDim.y + blockIdx.y) * H + j] = float(of_b);
}

}  // namespace

#define HB_LAYER_NORM(E, name)                                                                                        \
  extern "C" __global__ void layer_norm_##name(const E* x, const E* residual, const E* w, const E* b, E* y,           \
                                               float* rstd, E* sum, int H, float eps) {                               \
    layer_norm(x, residual, w, b, y, rstd, sum, H, eps);                                                              \
  }                                                                                                                   \
  extern "C" __global__ void layer_norm_backward_##name(const E* dy, const E* x, const E* w, const float* rstd,       \
                                                        E* dx, int H, int accumulate) {                               \
    layer_norm_backward(dy, x, w, rstd, dx, H, accumulate);                                                           \
  }                                                                                                                   \
  extern "C" __global__ void layer_norm_mean_##name(const E* x, float* means, int H) {                                \
    __shared__ float part[32];                                                                                        \
    const float mean = mean_of(x + size_t(blockIdx.x) * H, H, part);                                                  \
    if (threadIdx.x == 0) means[blockIdx.x] = mean;                                                                   \
  }                                                                                                                   \
  extern "C" __global__ void layer_norm_weight_##name(const E* dy, const E* x, const float* means, const float* rstd, \
                                                      float* parts, int T, int H, int each) {                         \
    layer_norm_weight(dy, x, means, rstd, parts, T, H, each);                                                         \
  }
HB_LAYER_NORM(float, f32)
HB_LAYER_NORM(bf16, bf16)
