// Log-probabilities of the targets under a temperature, and their backward; the token's loss; the next token. One block
// per token; a target below 0 is not predicted. logits fp32 -> logp[T], lse[T], entropy[T].
#include "common.cuh"

namespace {

/// What a row of logits under a temperature comes to; the same in every thread.
struct RowSums {
  float most;
  double sum, weighted;  // of e^x and of e^x x, x shifted by the maximum
  HB_DEVICE float log_prob(float x, float inverse_temperature, double log_sum) const {
    return float((double(x) - most) * inverse_temperature - log_sum);
  }
};

/// Two passes over the row: its maximum, then the sums, in fp64 as the other backends sum them. at(j): the j-th logit.
/// Sampling and training both come here, with blocks of one size: their log-probabilities are equal to the bit (P5).
template <class At>
HB_DEVICE RowSums row_sums(At at, int V, float inverse_temperature) {
  __shared__ float part[32];
  __shared__ double parts[32];
  RowSums s;
  float most = -INFINITY;
  for (int j = threadIdx.x; j < V; j += blockDim.x) most = fmaxf(most, at(j));
  s.most = block_max(most, part);
  double sum = 0, weighted = 0;
  for (int j = threadIdx.x; j < V; j += blockDim.x) {
    const float shifted = (at(j) - s.most) * inverse_temperature;
    const float e = expf(shifted);
    sum += e;
    weighted += double(e) * shifted;
  }
  s.sum = block_sum(sum, parts);
  s.weighted = block_sum(weighted, parts);
  return s;
}

/// dlogits = dlogp / temperature (onehot(target) - softmax) in the first V of `width` columns, zeros behind. The columns
/// are the ids from `first` on; lse is over all ids. Where softcap > 0, logits are softcap tanh(x / softcap) and the
/// gradients are of x.
template <class E>
HB_DEVICE void log_prob_backward(const float* logits, const float* lse, const int32_t* targets, const float* dlogp,
                                 E* dlogits, int first, int V, int width, float inverse_temperature,
                                 float softcap) {
  const int t = blockIdx.x, target = targets[t] - first;
  const float g = targets[t] < 0 ? 0.0f : dlogp[t] * inverse_temperature;
  const size_t row = size_t(t) * width;
  for (int j = threadIdx.x; j < width; j += blockDim.x) {
    float d = 0.0f;
    if (g != 0.0f && j < V) {
      d = expf(logits[row + j] * inverse_temperature - lse[t]) * -g;
      if (j == target) d += g;
      const float share = softcap > 0.0f ? logits[row + j] / softcap : 0.0f;
      d *= 1.0f - share * share;
    }
    store(dlogits + row + j, d);
  }
}

/// Sums of the lanes up to each.
HB_DEVICE double scanned(double x) {
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const double further = __shfl_up_sync(0xffffffffu, x, m);
    if (int(threadIdx.x & 31) >= m) x += further;
  }
  return x;
}

HB_DEVICE double max_or_nan(double a, double b) { return isnan(a) || isnan(b) ? nan("") : fmax(a, b); }

}  // namespace

/// logits[T,width], of which V columns are tokens.
extern "C" __global__ void log_prob(const float* logits, const int32_t* targets, float* logp, float* lse,
                                    float* entropy, int V, int width, float inverse_temperature) {
  const int t = blockIdx.x, target = targets[t];
  if (target < 0) {
    if (threadIdx.x == 0) logp[t] = lse[t] = entropy[t] = 0.0f;
    return;
  }
  const float* row = logits + size_t(t) * width;
  const RowSums s = row_sums([&](int j) { return row[j]; }, V, inverse_temperature);
  if (threadIdx.x == 0) {
    const double log_sum = log(s.sum);
    lse[t] = float(double(s.most) * inverse_temperature + log_sum);
    logp[t] = s.log_prob(row[target], inverse_temperature, log_sum);
    entropy[t] = float(log_sum - s.weighted / s.sum);
  }
}

#define HB_LOG_PROB_BACKWARD(E, name)                                                                              \
  extern "C" __global__ void log_prob_backward_##name(const float* logits, const float* lse, const int32_t* targets, \
                                                      const float* dlogp, E* dlogits, int first, int V, int width, \
                                                      float inverse_temperature, float softcap) {                  \
    log_prob_backward(logits, lse, targets, dlogp, dlogits, first, V, width, inverse_temperature, softcap);        \
  }
HB_LOG_PROB_BACKWARD(float, f32)
HB_LOG_PROB_BACKWARD(bf16, bf16)

/// What the ids first ... first + V - 1 add to a row's log-probability: stats[T,4] = largest logit, sum of e^x above it,
/// that sum of e^x x, the target's logit (0 where it is another part's). Zeros where nothing is predicted.
extern "C" __global__ void vocab_stats(const float* logits, const int32_t* targets, float* stats, int first, int V,
                                       int width, float inverse_temperature) {
  const int t = blockIdx.x, target = targets[t] - first;
  float* out = stats + 4 * size_t(t);
  if (targets[t] < 0 || V <= 0) {
    if (threadIdx.x == 0) out[0] = targets[t] < 0 ? 0.0f : -3.402823466e38f, out[1] = out[2] = out[3] = 0.0f;
    return;
  }
  const float* row = logits + size_t(t) * width;
  const RowSums s = row_sums([&](int j) { return row[j]; }, V, inverse_temperature);
  if (threadIdx.x == 0) {
    out[0] = s.most, out[1] = float(s.sum), out[2] = float(s.weighted);
    out[3] = target >= 0 && target < V ? row[target] : 0.0f;
  }
}

/// log_prob of stats[parts,T,4], a thread per token.
extern "C" __global__ void vocab_log_prob(const float* stats, const int32_t* targets, float* logp, float* lse,
                                          float* entropy, int parts, int T, float inverse_temperature) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= T) return;
  logp[t] = lse[t] = entropy[t] = 0.0f;
  if (targets[t] < 0) return;
  float most = stats[4 * size_t(t)], target = 0.0f;
  for (int p = 0; p < parts; ++p) {
    const float* part = stats + 4 * (size_t(p) * T + t);
    most = part[0] > most || isnan(part[0]) ? part[0] : most;
    target += part[3];
  }
  double sum = 0, weighted = 0;
  for (int p = 0; p < parts; ++p) {
    const float* part = stats + 4 * (size_t(p) * T + t);
    if (part[1] == 0.0f) continue;
    const double below = (double(part[0]) - most) * inverse_temperature, share = exp(below);
    sum += share * part[1];
    weighted += share * (part[2] + below * part[1]);
  }
  const double log_sum = log(sum);
  logp[t] = float((double(target) - most) * inverse_temperature - log_sum);
  lse[t] = float(double(most) * inverse_temperature + log_sum);
  entropy[t] = float(log_sum - weighted / sum);
}

/// The clipped surrogate with the k3 estimator of KL(new, ref), or -logp (sft): dlogp[T], and 9 sums into metrics
/// (graph/slots.h: Metric). One block, fp64, an order that depends on its size alone. old, reference: null where unused.
extern "C" __global__ void token_loss(const float* logp_new, const float* old, const float* reference,
                                      const float* advantage, const float* weight, const float* entropy, float* dlogp,
                                      float* metrics, int T, float clip_low, float clip_high, float kl_coef) {
  constexpr int most_gap = 8, num_sums = 9;  // Metric::max_logp_gap: a maximum, the others are sums
  __shared__ double parts[32];
  double sums[num_sums] = {};
  for (int t = threadIdx.x; t < T; t += blockDim.x) {
    const double w = weight[t];
    dlogp[t] = 0.0f;
    if (w == 0.0) continue;
    const double logp = logp_new[t];
    double policy = -logp, d_policy = -1.0, k3 = 0, d_k3 = 0;
    bool clipped = false;
    if (old != nullptr) {
      const double ratio = exp(logp - old[t]), gain = advantage[t];
      const double free = -gain * ratio;
      const double bounded = -gain * fmin(fmax(ratio, 1.0 - clip_low), 1.0 + clip_high);
      clipped = bounded > free;
      policy = clipped ? bounded : free;
      d_policy = clipped ? 0.0 : free;
      const double gap = double(old[t]) - logp_new[t];
      sums[3] += w * gap;
      sums[7] += fabs(gap);
      sums[most_gap] = max_or_nan(sums[most_gap], fabs(gap));
    }
    if (reference != nullptr) {
      const double gap = double(reference[t]) - logp;
      k3 = expm1(gap) - gap;
      d_k3 = -expm1(gap);
    }
    dlogp[t] = float(w * (d_policy + kl_coef * d_k3));
    sums[0] += w * (policy + kl_coef * k3);
    sums[1] += w * policy;
    sums[2] += w * k3;
    sums[4] += clipped ? 1.0 : 0.0;
    sums[5] += 1.0;
    sums[6] += w * entropy[t];
  }
#pragma unroll
  for (int i = 0; i < num_sums; ++i) {
    if (i == most_gap) {
      const double bad = block_sum(isnan(sums[i]) ? 1.0 : 0.0, parts);
      double most = isnan(sums[i]) ? 0.0 : sums[i];
#pragma unroll
      for (int m = 16; m > 0; m >>= 1) most = fmax(most, __shfl_xor_sync(0xffffffffu, most, m));
      if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = most;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int w = 1; w < int(blockDim.x >> 5); ++w) most = fmax(most, parts[w]);
        metrics[i] = float(max_or_nan(metrics[i], bad > 0 ? nan("") : most));
      }
    } else {
      const double sum = block_sum(sums[i], parts);
      if (threadIdx.x == 0) metrics[i] = float(metrics[i] + sum);
    }
  }
}

/// The next token of sequence s by inverse transform of uniforms[s]: in index order, or, truncated by top_k or top_p, in
/// descending order of probability (the lower index first among equals). logits [tp][S][width], of which V columns are
/// tokens. temperature 0: the largest logit. logp: of the untruncated distribution under the temperature (greedy: 1).
/// One block per sequence, of as many threads as log_prob's.
extern "C" __global__ void sample(const float* logits, const float* uniforms, int32_t* ids, float* logp, int S, int V,
                                  int width, float temperature, int top_k, float top_p) {
  __shared__ double chunk_sums[1024];
  __shared__ float best_value[32];
  __shared__ int best_index[32];
  __shared__ int chosen;
  const int s = blockIdx.x, threads = blockDim.x;
  const auto at = [&](int j) { return logits[(size_t(j / width) * S + s) * width + j % width]; };
  const float inverse = temperature == 0.0f ? 1.0f : 1.0f / temperature;
  const RowSums sums = row_sums(at, V, inverse);
  const auto mass_of = [&](int j) { return double(expf((at(j) - sums.most) * inverse)); };
  // The next in descending order behind (value, index); the same in every thread.
  const auto behind = [&](float value, int index, float& next, int& where) {
    float most = -INFINITY;
    int j_most = V;
    for (int j = threadIdx.x; j < V; j += threads) {
      const float x = at(j);
      if (index >= 0 && (x > value || (x == value && j <= index))) continue;
      if (j_most == V || x > most) most = x, j_most = j;
    }
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
      const float x = __shfl_xor_sync(0xffffffffu, most, m);
      const int j = __shfl_xor_sync(0xffffffffu, j_most, m);
      if (j < V && (j_most == V || x > most || (x == most && j < j_most))) most = x, j_most = j;
    }
    if ((threadIdx.x & 31) == 0) best_value[threadIdx.x >> 5] = most, best_index[threadIdx.x >> 5] = j_most;
    __syncthreads();
    next = best_value[0], where = best_index[0];
    for (int w = 1; w < threads >> 5; ++w)
      if (best_index[w] < V &&
          (where == V || best_value[w] > next || (best_value[w] == next && best_index[w] < where)))
        next = best_value[w], where = best_index[w];
    __syncthreads();
  };
  int token = 0;
  if (temperature == 0.0f) {
    float most;
    behind(0.0f, -1, most, token);
  } else if (const int k = top_k > 0 && top_k < V ? top_k : V; k == V && top_p >= 1.0f) {
    // As many stretches as threads: a warp sums 32 of them, the first warp finds the stretch and then the token.
    const int each = (V + threads - 1) / threads, stretch = int(threadIdx.x) & ~31;
    for (int c = stretch; c < stretch + 32; ++c) {
      double sum = 0;
      for (int j = c * each + int(threadIdx.x & 31); j < (c + 1) * each && j < V; j += 32) sum += mass_of(j);
      sum = warp_sum(sum);
      if ((threadIdx.x & 31) == 0) chunk_sums[c] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = int(threadIdx.x), stretches = threads / 32;
      double of_lane = 0;
      for (int c = lane * stretches; c < (lane + 1) * stretches; ++c) of_lane += chunk_sums[c];
      double upto = scanned(of_lane);
      const double target = uniforms[s] * __shfl_sync(0xffffffffu, upto, 31);
      const unsigned beyond = __ballot_sync(0xffffffffu, upto > target);
      const int holder = beyond == 0 ? 31 : __ffs(int(beyond)) - 1;
      double before = __shfl_sync(0xffffffffu, upto - of_lane, holder);
      int c = holder * stretches;
      while (c + 1 < (holder + 1) * stretches && before + chunk_sums[c] <= target) before += chunk_sums[c++];
      int found = -1, last = -1;  // the token; the last that is possible
      for (int from = c * each; from < V && found < 0; from += 32) {
        const int j = from + lane;
        const double p = j < V ? mass_of(j) : 0.0;
        upto = before + scanned(p);
        const unsigned possible = __ballot_sync(0xffffffffu, p > 0.0);
        const unsigned here = __ballot_sync(0xffffffffu, p > 0.0 && upto > target);
        if (possible != 0) last = from + 31 - __clz(int(possible));
        if (here != 0) found = from + __ffs(int(here)) - 1;
        before = __shfl_sync(0xffffffffu, upto, 31);
      }
      // Rounding left the sum just below the target: the last that is possible, at or before that stretch.
      for (int from = min(c * each, V) - 32; found < 0 && last < 0 && from > -32; from -= 32) {
        const unsigned possible = __ballot_sync(0xffffffffu, from + lane >= 0 && mass_of(max(from + lane, 0)) > 0.0);
        if (possible != 0) last = from + 31 - __clz(int(possible));
      }
      if (lane == 0) chosen = max(found >= 0 ? found : last, 0);  // of NaNs none is possible
    }
    __syncthreads();
    token = chosen;
  } else {
    double mass = 0;
    float value = 0;
    int index = -1;
    if (k == V) {
      mass = sums.sum;
    } else {
      for (int i = 0; i < k; ++i) {
        behind(value, index, value, index);
        mass += mass_of(index);
      }
    }
    int kept = k;
    if (top_p < 1.0f) {  // the smallest prefix with so much mass, at least one
      const double wanted = top_p * mass;
      index = -1;
      behind(value, index, value, index);
      double sum = mass_of(index);
      for (kept = 1; kept < k && sum < wanted; ++kept) {
        behind(value, index, value, index);
        sum += mass_of(index);
      }
      mass = sum;
    }
    const double target = uniforms[s] * mass;
    double before = 0;
    index = -1;
    for (int i = 0; i < kept; ++i) {
      behind(value, index, value, index);
      const double p = mass_of(index);
      if (p > 0.0) token = index;
      before += p;
      if (before > target) break;
    }
  }
  if (threadIdx.x == 0) {
    ids[s] = token;
    logp[s] = sums.log_prob(at(token), inverse, log(sums.sum));
  }
}
