// rms_norm and the fused residual sum: one block per row of T. qk_norm, over the heads of packed qkv rows: one warp per
// row and head. Backward: one block per part of `each` rows (norm_rows.cuh). Shapes as in graph/catalogue.h. offset: by
// w + offset in the place of w.
#include "norm_rows.cuh"

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
  for (int j = threadIdx.x; j < H; j += blockDim.x)
    store(y + row + j, load(from + row + j) * r * (load(w + j) + offset));
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

constexpr int most_warps = 4, held_of_head = 8;  // of a head's at most 256 numbers, a lane's

/// What a block of qk_norm's backward works on: rows begin to end, of all heads; dx may be dy.
template <class E>
struct HeadRows {
  const E *dy, *x;
  const float* rstd;
  E* dx;
  int begin, end, a, k, d;
};

/// dx = rstd (dy w - x rstd^2 mean(dy w x)) of `count` heads from `first` on; part[j] = sum of dy x rstd, rows and
/// heads in order for each warp, then warps in order; nullptr where the weight is frozen. A warp per row and head.
template <class E>
HB_DEVICE void qk_norm_heads(const HeadRows<E>& in, const E* w, float offset, int first, int count, float* part,
                             float* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  float sums[held_of_head] = {};
  const auto columns = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < held_of_head; ++k)
      if (const int j = lane + 32 * k; j < in.d) visit(j, k);
  };
  for (int i = warp; i < (in.end - in.begin) * count; i += warps) {
    const int t = in.begin + i / count, head = first + i % count;
    const size_t at = (size_t(t) * (in.a + 2 * in.k) + head) * in.d;
    float g[held_of_head], v[held_of_head], dot = 0;
    columns([&](int j, int k) { g[k] = load(in.dy + at + j), v[k] = load(in.x + at + j); });
    columns([&](int j, int k) { dot += g[k] * (load(w + j) + offset) * v[k]; });
    const float r = in.rstd[size_t(t) * (in.a + in.k) + head];
    const float c = warp_sum(dot) / float(in.d) * r * r * r;
    columns([&](int j, int k) {
      sums[k] += g[k] * v[k] * r;
      store(in.dx + at + j, g[k] * (load(w + j) + offset) * r - v[k] * c);
    });
  }
  if (part == nullptr) return;
  columns([&](int j, int k) { shared[warp * in.d + j] = sums[k]; });
  __syncthreads();
  for (int j = threadIdx.x; j < in.d; j += blockDim.x) {
    float sum = 0;
    for (int of = 0; of < warps; ++of) sum += shared[of * in.d + j];
    part[j] = sum;
  }
  __syncthreads();
}

/// Query and key heads, and the copy of value heads. parts: of dqw, [blocks, d], and behind them of dkw.
template <class E>
HB_DEVICE void qk_norm_backward(const HeadRows<E>& in, const E* qw, const E* kw, float offset, float* parts,
                                float* shared) {
  float *of_q = nullptr, *of_k = nullptr;
  if (parts != nullptr) {
    of_q = parts + size_t(blockIdx.x) * in.d;
    of_k = of_q + size_t(gridDim.x) * in.d;
  }
  qk_norm_heads(in, qw, offset, 0, in.a, of_q, shared);
  qk_norm_heads(in, kw, offset, in.a, in.k, of_k, shared);
  const int width = in.k * in.d;
  for (int t = in.begin; t < in.end; ++t) {
    const size_t at = (size_t(t) * (in.a + 2 * in.k) + in.a + in.k) * in.d;
    for (int j = threadIdx.x; j < width; j += blockDim.x) in.dx[at + j] = in.dy[at + j];
  }
}

}  // namespace

#define HB_QK_NORM(E, name)                                                                                        \
  extern "C" __global__ void qk_norm_##name(const E* x, const E* qw, const E* kw, E* y, float* rstd, int T, int a, \
                                            int k, int d, float eps, float offset) {                               \
    qk_norm(x, qw, kw, y, rstd, T, a, k, d, eps, offset);                                                          \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(32 * most_warps, 4)                                                 \
      qk_norm_backward_##name(const E* dy, const E* x, const E* qw, const E* kw, const float* rstd, E* dx,         \
                              float* parts, int T, int a, int k, int d, int each, float offset) {                  \
    __shared__ float shared[most_warps * 32 * held_of_head];                                                       \
    const int begin = blockIdx.x * each;                                                                           \
    qk_norm_backward<E>({dy, x, rstd, dx, begin, min(begin + each, T), a, k, d}, qw, kw, offset, parts, shared);   \
  }
HB_QK_NORM(float, f32)
HB_QK_NORM(bf16, bf16)

#define HB_NORM(E, name)                                                                                            \
  extern "C" __global__ void rms_norm_##name(const E* x, const E* residual, const E* w, E* y, float* rstd, E* sum,  \
                                             int H, float eps, float offset) {                                      \
    rms_norm(x, residual, w, y, rstd, sum, H, eps, offset);                                                         \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(1024)                                                                \
      rms_norm_backward_##name(const E* dy, const E* x, const E* w, const float* rstd, E* dx, float* parts, int T,  \
                               int H, int each, float offset, int accumulate) {                                     \
    __shared__ float shared[32];                                                                                    \
    const int begin = blockIdx.x * each;                                                                            \
    float* part = parts == nullptr ? nullptr : parts + size_t(blockIdx.x) * H;                                      \
    rms_norm_rows<E>({dy, x, w, rstd, dx, part, begin, min(begin + each, T), H, H, H}, offset, accumulate, shared); \
  }
HB_NORM(float, f32)
HB_NORM(bf16, bf16)
