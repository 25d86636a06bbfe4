// Log-probabilities of the targets under a temperature, and their backward. One block per token; a target below 0 is
// not predicted. logits[T,V] fp32 -> logp[T], lse[T], entropy[T].
#include "common.cuh"

/// Two passes over the row: its maximum, then sum e^x and sum e^x x, in fp64 as the other backends sum them.
extern "C" __global__ void log_prob(const float* logits, const int32_t* targets, float* logp, float* lse,
                                    float* entropy, int V, float inverse_temperature) {
  __shared__ float part[32];
  __shared__ double parts[32];
  const int t = blockIdx.x, target = targets[t];
  if (target < 0) {
    if (threadIdx.x == 0) logp[t] = lse[t] = entropy[t] = 0.0f;
    return;
  }
  const float* row = logits + size_t(t) * V;
  float most = -INFINITY;
  for (int j = threadIdx.x; j < V; j += blockDim.x) most = fmaxf(most, row[j]);
  most = block_max(most, part);
  double sum = 0, weighted = 0;
  for (int j = threadIdx.x; j < V; j += blockDim.x) {
    const float shifted = (row[j] - most) * inverse_temperature;
    const float e = expf(shifted);
    sum += e;
    weighted += double(e) * shifted;
  }
  sum = block_sum(sum, parts);
  weighted = block_sum(weighted, parts);
  if (threadIdx.x == 0) {
    const double log_sum = log(sum);
    lse[t] = float(double(most) * inverse_temperature + log_sum);
    logp[t] = float((double(row[target]) - most) * inverse_temperature - log_sum);
    entropy[t] = float(log_sum - weighted / sum);
  }
}

namespace {

/// dlogits = dlogp / temperature (onehot(target) - softmax).
template <class E>
HB_DEVICE void log_prob_backward(const float* logits, const float* lse, const int32_t* targets, const float* dlogp,
                                 E* dlogits, int V, float inverse_temperature) {
  const int t = blockIdx.x, target = targets[t];
  const float g = target < 0 ? 0.0f : dlogp[t] * inverse_temperature;
  const size_t row = size_t(t) * V;
  for (int j = threadIdx.x; j < V; j += blockDim.x) {
    float d = 0.0f;
    if (g != 0.0f) {
      d = expf(logits[row + j] * inverse_temperature - lse[t]) * -g;
      if (j == target) d += g;
    }
    store(dlogits + row + j, d);
  }
}

}  // namespace

extern "C" __global__ void log_prob_backward_f32(const float* logits, const float* lse, const int32_t* targets,
                                                 const float* dlogp, float* dlogits, int V, float inverse_temperature) {
  log_prob_backward(logits, lse, targets, dlogp, dlogits, V, inverse_temperature);
}
extern "C" __global__ void log_prob_backward_bf16(const float* logits, const float* lse, const int32_t* targets,
                                                  const float* dlogp, bf16* dlogits, int V, float inverse_temperature) {
  log_prob_backward(logits, lse, targets, dlogp, dlogits, V, inverse_temperature);
}
