// The optimizer step of one shard: sum of squares (two kernels, a fixed order), the clip coefficient, AdamW.
#include "common.cuh"

namespace {

/// b^n, n a whole number from 1: by squaring.
HB_DEVICE double power(double b, int n) {
  double out = 1;
  for (; n > 0; n >>= 1, b *= b)
    if (n & 1) out *= b;
  return out;
}

}  // namespace

/// partial[block] = sum of squares of the block's elements; grid-stride, fp64.
extern "C" __global__ void sum_squares_partial(const float* x, double* partial, int64_t n) {
  __shared__ double part[32];
  double sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    sum += double(x[i]) * x[i];
  sum = block_sum(sum, part);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/// s[0] (+)= the partial sums, in order. One thread.
extern "C" __global__ void sum_squares_finish(const double* partial, float* s, int blocks, int accumulate) {
  double sum = accumulate ? s[0] : 0.0;
  for (int b = 0; b < blocks; ++b) sum += partial[b];
  s[0] = float(sum);
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
/// clip coefficient c[0]; no finite one: no step. lr[0] the rate, lr[1] the step from 1.
extern "C" __global__ void adamw(const float* g, const float* lr, const float* c, float* p, float* m, float* v,
                                 int64_t n, float beta1, float beta2, float eps, float decay) {
  const float rate = lr[0], scale = c[0];
  if (!isfinite(scale)) return;  // no step: all stays as it is
  const int step = int(lr[1]);
  const float correction1 = float(1.0 - power(beta1, step)), correction2 = float(sqrt(1.0 - power(beta2, step)));
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const float x = g[i] * scale;
    const float mi = m[i] = beta1 * m[i] + (1.0f - beta1) * x;
    const float vi = v[i] = beta2 * v[i] + (1.0f - beta2) * x * x;
    p[i] -= rate * (mi / correction1 / (sqrtf(vi) / correction2 + eps) + decay * p[i]);
  }
}
