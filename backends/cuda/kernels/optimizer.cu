// The optimizer step of a rank's shards: sum of squares (two kernels, a fixed order), the clip coefficient, AdamW. The
// sums and the step take many tensors in one launch (many.h); what a tensor gets does not depend on which others are in
// its launch, to the bit.
#include "backends/cuda/kernels/many.h"
#include "common.cuh"

using namespace hotbunk;

namespace {

/// b^n, n a whole number from 1: by squaring.
HB_DEVICE double power(double b, int n) {
  double out = 1;
  for (; n > 0; n >>= 1, b *= b)
    if (n & 1) out *= b;
  return out;
}

/// The tensor that this block works on: first_block[i] <= blockIdx.x < first_block[i + 1].
HB_DEVICE int tensor_here(const ManyTensors& many) {
  int low = 0, high = many.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (many.first_block[middle] <= int(blockIdx.x)) low = middle;
    else high = middle;
  }
  return low;
}

/// partial[block] = sum of squares of the block's elements of its tensor, which it walks by the tensor's blocks; fp64.
template <class G>
HB_DEVICE void sum_squares_partial(const SquaredTensors& tensors, double* partial) {
  __shared__ double part[32];
  const int i = tensor_here(tensors.many), first = tensors.many.first_block[i];
  const int64_t n = tensors.many.n[i], stride = int64_t(tensors.many.first_block[i + 1] - first) * blockDim.x;
  const G* x = static_cast<const G*>(tensors.x[i]);
  double sum = 0;
#pragma unroll 4
  for (int64_t j = int64_t(blockIdx.x - first) * blockDim.x + threadIdx.x; j < n; j += stride) {
    const double here = load(x + j);
    sum += here * here;
  }
  sum = block_sum(sum, part);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/// adamw, below, of gradients of one dtype.
template <class G>
HB_DEVICE void step(const SteppedTensors& tensors, const float* lr, const float* c, float beta1, float beta2, float eps,
                    float decay) {
  __shared__ float told[4];  // rate, scale, corrections: read and formed once a block
  if (threadIdx.x == 0) {
    const int step = int(lr[1]);
    told[0] = lr[0], told[1] = c[0];
    told[2] = float(1.0 - power(beta1, step)), told[3] = float(sqrt(1.0 - power(beta2, step)));
  }
  __syncthreads();
  const float rate = told[0], scale = told[1], correction1 = told[2], correction2 = told[3];
  if (!isfinite(scale)) return;  // no step: all stays as it is
  const int i = tensor_here(tensors.many);
  const G* g = static_cast<const G*>(tensors.g[i]);
  float *p = tensors.p[i], *m = tensors.m[i], *v = tensors.v[i];
  const int64_t begin = int64_t(blockIdx.x - tensors.many.first_block[i]) * stepped_by_block, n = tensors.many.n[i];
  const int64_t end = begin + stepped_by_block < n ? begin + stepped_by_block : n;
  // All reads of a thread's four elements are asked for before its first write, which may not pass them.
  constexpr int each = 4;
  for (int64_t from = begin + threadIdx.x; from < end; from += each * blockDim.x) {
    float gj[each], pj[each], mj[each], vj[each];
#pragma unroll
    for (int e = 0; e < each; ++e) {
      const int64_t j = from + e * int(blockDim.x);
      if (j < end) gj[e] = load(g + j), pj[e] = p[j], mj[e] = m[j], vj[e] = v[j];
    }
#pragma unroll
    for (int e = 0; e < each; ++e) {
      const int64_t j = from + e * int(blockDim.x);
      if (j >= end) break;
      const float x = gj[e] * scale;
      m[j] = mj[e] = beta1 * mj[e] + (1.0f - beta1) * x;
      v[j] = vj[e] = beta2 * vj[e] + (1.0f - beta2) * x * x;
      p[j] = pj[e] - rate * (mj[e] / correction1 / (sqrtf(vj[e]) / correction2 + eps) + decay * pj[e]);
    }
  }
}

}  // namespace

/// s[0] (+)= the tensors' sums in order, rounded to fp32 after each, as if each came by itself. A warp sums a tensor's
/// partial sums; one block.
extern "C" __global__ void sum_squares_finish(const __grid_constant__ ManyTensors many, const double* partial, float* s,
                                              int accumulate) {
  __shared__ double sums[most_tensors];
  const int lane = threadIdx.x & 31;
  for (int i = threadIdx.x >> 5; i < many.count; i += blockDim.x >> 5) {
    double sum = 0;
    for (int b = many.first_block[i] + lane; b < many.first_block[i + 1]; b += 32) sum += partial[b];
    sum = warp_sum(sum);
    if (lane == 0) sums[i] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = accumulate ? s[0] : 0.0f;
  for (int i = 0; i < many.count; ++i) total = float(double(total) + sums[i]);
  s[0] = total;
}

/// c[0] = min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_, 1 where max_norm is 0; NaN where the
/// norm or the loss is no finite number: both are sums over all ranks, so all refuse the step or none does. One thread.
extern "C" __global__ void clip_coefficient(const float* sum_squares, float* c, float* metrics, double max_norm,
                                            int loss_at, int norm_at, int coefficient_at) {
  const double norm = sqrt(double(sum_squares[0]));
  const bool finite = isfinite(norm) && isfinite(metrics[loss_at]);
  const float coefficient = !finite ? nanf("") : max_norm > 0 ? float(fmin(1.0, max_norm / (norm + 1e-6))) : 1.0f;
  c[0] = coefficient;
  metrics[norm_at] = float(norm);
  metrics[coefficient_at] = coefficient;
}

/// Decoupled weight decay (Loshchilov & Hutter): p -= lr (m_hat / (sqrt(v_hat) + eps) + decay p). g is scaled by the
/// clip coefficient c[0]; no finite one: no step. lr[0] the rate, lr[1] the step from 1. Named by the gradients' dtype.
#define HB_OPTIMIZER(G, name)                                                                                          \
  extern "C" __global__ void sum_squares_partial_##name(const __grid_constant__ SquaredTensors tensors,                \
                                                        double* partial) {                                             \
    sum_squares_partial<G>(tensors, partial);                                                                          \
  }                                                                                                                    \
  extern "C" __global__ void adamw_##name(const __grid_constant__ SteppedTensors tensors, const float* lr,             \
                                          const float* c, float beta1, float beta2, float eps, float decay) {          \
    step<G>(tensors, lr, c, beta1, beta2, eps, decay);                                                                 \
  }
HB_OPTIMIZER(float, f32)
HB_OPTIMIZER(bf16, bf16)
