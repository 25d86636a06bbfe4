// rms_norm, its backward, and the fused residual sum: one block per row of T. qk_norm, over the heads of packed qkv rows:
// one warp per row and head. Shapes as in graph/catalogue.h. offset: by w + offset in the place of w.
#include "common.cuh"

namespace {

/// y[t,:] = x[t,:] rstd[t] w, rstd[t] = 1 / sqrt(mean(x[t,:]^2) + eps). With `residual`, x is first x + residual and
/// that sum, rounded to E, goes to `sum`.
template <class E>
HB_DEVICE void rms_norm(const E* x, const E* residual, const E* w, E* y, float* rstd, E* sum, int H, float eps,
                        float offset) {
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
  for (int j = threadIdx.x; j < H; j += blockDim.x) store(y + row + j, load(from + row + j) * r * (load(w + j) + offset));
}

/// dx (+)= rstd (dy w - x rstd^2 mean(dy w x)).
template <class E>
HB_DEVICE void rms_norm_backward(const E* dy, const E* x, const E* w, const float* rstd, E* dx, int H, float offset,
                                 int accumulate) {
  __shared__ float part[32];
  const size_t row = size_t(blockIdx.x) * H;
  float dot = 0;
  for (int j = threadIdx.x; j < H; j += blockDim.x) dot += load(dy + row + j) * (load(w + j) + offset) * load(x + row + j);
  const float r = rstd[blockIdx.x];
  const float c = block_sum(dot, part) / float(H) * r * r * r;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    float g = load(dy + row + j) * (load(w + j) + offset) * r - load(x + row + j) * c;
    if (accumulate) g += load(dx + row + j);
    store(dx + row + j, g);
  }
}

/// Parts of dw, [blocks y, H], of `each` rows: sums over t of dy[t,j] x[t,j] rstd[t]; a thread per column, tokens in order,
/// fp64 inside. column_sums (elementwise.cu) adds them up.
template <class E>
HB_DEVICE void rms_norm_weight(const E* dy, const E* x, const float* rstd, float* parts, int T, int H, int each) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, begin = blockIdx.y * each, end = min(begin + each, T);
  if (j >= H) return;
  double sum = 0;
  for (int t = begin; t < end; ++t) sum += load(dy + size_t(t) * H + j) * load(x + size_t(t) * H + j) * rstd[t];
  parts[size_t(blockIdx.y) * H + j] = float(sum);
}

/// Query and key heads are normed by a weight of their own, value heads copied. A warp per row and head.
template <class E>
HB_DEVICE void qk_norm(const E* x, const E* qw, const E* kw, E* y, float* rstd, int T, int a, int k, int d, float eps,
                       float offset) {
  const int lane = threadIdx.x & 31, heads = a + 2 * k;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= int64_t(T) * heads) return;
  const int t = int(at / heads), head = int(at % heads);
  const E* from = x + at * d;
  E* to = y + at * d;
  if (head >= a + k) {
    for (int j = lane; j < d; j += 32) to[j] = from[j];
    return;
  }
  float squares = 0;
  for (int j = lane; j < d; j += 32) squares += load(from + j) * load(from + j);
  const float r = rsqrtf(warp_sum(squares) / float(d) + eps);
  if (lane == 0) rstd[size_t(t) * (a + k) + head] = r;
  const E* w = head < a ? qw : kw;
  for (int j = lane; j < d; j += 32) store(to + j, load(from + j) * r * (load(w + j) + offset));
}

/// dx = rstd (dy w - x rstd^2 mean(dy w x)) of query and key heads; dx may be dy.
template <class E>
HB_DEVICE void qk_norm_backward(const E* dy, const E* x, const E* qw, const E* kw, const float* rstd, E* dx, int T,
                                int a, int k, int d, float offset) {
  const int lane = threadIdx.x & 31, heads = a + 2 * k;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= int64_t(T) * heads) return;
  const int t = int(at / heads), head = int(at % heads);
  const E *g = dy + at * d, *from = x + at * d;
  E* to = dx + at * d;
  if (head >= a + k) {
    for (int j = lane; j < d; j += 32) to[j] = g[j];
    return;
  }
  const E* w = head < a ? qw : kw;
  float dot = 0;
  for (int j = lane; j < d; j += 32) dot += load(g + j) * (load(w + j) + offset) * load(from + j);
  const float r = rstd[size_t(t) * (a + k) + head];
  const float c = warp_sum(dot) / float(d) * r * r * r;
  for (int j = lane; j < d; j += 32) store(to + j, load(g + j) * (load(w + j) + offset) * r - load(from + j) * c);
}

/// Parts of dqw, [parts, d], and behind them of dkw, of `each` rows: a thread per element of a head, rows and heads in
/// order, fp64 inside. Grid y: parts of dqw, then of dkw.
template <class E>
HB_DEVICE void qk_norm_weight(const E* dy, const E* x, const float* rstd, float* parts, int T, int a, int k, int d,
                              int each) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.y / 2, part = blockIdx.y % n;
  if (j >= d) return;
  const bool of_queries = int(blockIdx.y) < n;
  const int first = of_queries ? 0 : a, last = of_queries ? a : a + k;
  double sum = 0;
  for (int t = part * each; t < min((part + 1) * each, T); ++t)
    for (int head = first; head < last; ++head) {
      const size_t at = (size_t(t) * (a + 2 * k) + head) * d + j;
      sum += load(dy + at) * load(x + at) * rstd[size_t(t) * (a + k) + head];
    }
  parts[size_t(blockIdx.y) * d + j] = float(sum);
}

}  // namespace

#define HB_QK_NORM(E, name)                                                                                            \
  extern "C" __global__ void qk_norm_##name(const E* x, const E* qw, const E* kw, E* y, float* rstd, int T, int a,     \
                                            int k, int d, float eps, float offset) {                                   \
    qk_norm(x, qw, kw, y, rstd, T, a, k, d, eps, offset);                                                              \
  }                                                                                                                    \
  extern "C" __global__ void qk_norm_backward_##name(const E* dy, const E* x, const E* qw, const E* kw,                \
                                                     const float* rstd, E* dx, int T, int a, int k, int d,             \
                                                     float offset) {                                                   \
    qk_norm_backward(dy, x, qw, kw, rstd, dx, T, a, k, d, offset);                                                     \
  }                                                                                                                    \
  extern "C" __global__ void qk_norm_weight_##name(const E* dy, const E* x, const float* rstd, float* parts, int T,    \
                                                   int a, int k, int d, int each) {                                    \
    qk_norm_weight(dy, x, rstd, parts, T, a, k, d, each);                                                              \
  }
HB_QK_NORM(float, f32)
HB_QK_NORM(bf16, bf16)

#define HB_NORM(E, name)                                                                                             \
  extern "C" __global__ void rms_norm_##name(const E* x, const E* residual, const E* w, E* y, float* rstd, E* sum,   \
                                             int H, float eps, float offset) {                                       \
    rms_norm(x, residual, w, y, rstd, sum, H, eps, offset);                                                          \
  }                                                                                                                  \
  extern "C" __global__ void rms_norm_backward_##name(const E* dy, const E* x, const E* w, const float* rstd, E* dx, \
                                                      int H, float offset, int accumulate) {                         \
    rms_norm_backward(dy, x, w, rstd, dx, H, offset, accumulate);                                                    \
  }                                                                                                                  \
  extern "C" __global__ void rms_norm_weight_##name(const E* dy, const E* x, const float* rstd, float* parts, int T, \
                                                    int H, int each) {                                               \
    rms_norm_weight(dy, x, rstd, parts, T, H, each);                                                                 \
  }
HB_NORM(float, f32)
HB_NORM(bf16, bf16)
