// rms_norm, its backward, and the fused residual sum. One block per row of T; shapes as in graph/catalogue.h.
#include "common.cuh"

namespace {

/// y[t,:] = x[t,:] rstd[t] w, rstd[t] = 1 / sqrt(mean(x[t,:]^2) + eps). With `residual`, x is first x + residual and
/// that sum, rounded to E, goes to `sum`.
template <class E>
HB_DEVICE void rms_norm(const E* x, const E* residual, const E* w, E* y, float* rstd, E* sum, int H, float eps) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  float squares = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    float v = load(x + row + j);
    if (residual != nullptr) {
      store(sum + row + j, v + load(residual + row + j));
      v = load(sum + row + j);  // what later layers read
    }
    squares += v * v;
  }
  const float r = rsqrtf(block_sum(squares, part) / float(H) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
  const E* from = residual != nullptr ? sum : x;
  for (int j = threadIdx.x; j < H; j += blockDim.x) store(y + row + j, load(from + row + j) * r * load(w + j));
}

/// dx (+)= rstd (dy w - x rstd^2 mean(dy w x)).
template <class E>
HB_DEVICE void rms_norm_backward(const E* dy, const E* x, const E* w, const float* rstd, E* dx, int H, int accumulate) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  float dot = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) dot += load(dy + row + j) * load(w + j) * load(x + row + j);
  const float r = rstd[blockIdx.x];
  const float c = block_sum(dot, part) / float(H) * r * r * r;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    float g = load(dy + row + j) * load(w + j) * r - load(x + row + j) * c;
    if (accumulate) g += load(dx + row + j);
    store(dx + row + j, g);
  }
}

/// dw[j] (+)= sum over t of dy[t,j] x[t,j] rstd[t]: a thread per column, tokens in order, fp64 inside.
template <class E>
HB_DEVICE void rms_norm_weight(const E* dy, const E* x, const float* rstd, float* dw, int T, int H, int accumulate) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= H) return;
  double sum = accumulate ? dw[j] : 0.0;
  for (int t = 0; t < T; ++t) sum += load(dy + size_t(t) * H + j) * load(x + size_t(t) * H + j) * rstd[t];
  dw[j] = float(sum);
}

}  // namespace

#define HB_NORM(E, name)                                                                                             \
  extern "C" __global__ void rms_norm_##name(const E* x, const E* residual, const E* w, E* y, float* rstd, E* sum,   \
                                             int H, float eps) {                                                     \
    rms_norm(x, residual, w, y, rstd, sum, H, eps);                                                                  \
  }                                                                                                                  \
  extern "C" __global__ void rms_norm_backward_##name(const E* dy, const E* x, const E* w, const float* rstd, E* dx, \
                                                      int H, int accumulate) {                                       \
    rms_norm_backward(dy, x, w, rstd, dx, H, accumulate);                                                            \
  }                                                                                                                  \
  extern "C" __global__ void rms_norm_weight_##name(const E* dy, const E* x, const float* rstd, float* dw, int T,    \
                                                    int H, int accumulate) {                                         \
    rms_norm_weight(dy, x, rstd, dw, T, H, accumulate);                                                              \
  }
HB_NORM(float, f32)
HB_NORM(bf16, bf16)
