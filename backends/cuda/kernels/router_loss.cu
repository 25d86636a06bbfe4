// What routers add to the loss in training (op catalogue: expert_counts, router_loss). T tokens of S sequences, E
// experts, c of them for each token. Sums are fp64, in an order that depends on nothing but T and E.
#include "routing.cuh"

namespace {

/// balance: with the factor E. sharers: ranks that find the same, each of which adds that part of the gradient.
struct RouterLoss {
  double balance, z;
  int experts, choices, sigmoid, sharers;
};

/// Of logits x and its sequence's counts n, with shares p of the experts in a token's scores and its sequence's length
/// L = sum n / c: the loss balance sum n p + z L lse(x)^2, times the token's weight; its gradient is added to d_logits.
/// A warp per token; one of no sequence, or that weighs nothing, adds nothing.
template <class E>
HB_DEVICE void router_loss(E* d_logits, const float* logits, const float* counts, const int32_t* sequences,
                           const float* weights, double* losses, int T, const RouterLoss& r) {
  const int lane = threadIdx.x & 31;
  const int64_t t = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (t >= T) return;
  const int s = sequences[t];
  const double weight = weights[t];
  if (s < 0 || weight == 0.0) {
    if (lane == 0) losses[t] = 0.0;
    return;
  }
  const float *x = logits + t * r.experts, *n = counts + int64_t(s) * r.experts;
  float largest = -INFINITY;
  for (int e = lane; e < r.experts; e += 32) largest = fmaxf(largest, x[e]);
  largest = warp_max(largest);
  double exps = 0, scores = 0, counted = 0, all = 0;
  for (int e = lane; e < r.experts; e += 32) {
    const double part = exp(double(x[e]) - largest), score = r.sigmoid ? sigmoid_of(x[e]) : part;
    exps += part, scores += score, counted += score * n[e], all += n[e];
  }
  exps = warp_sum(exps), scores = warp_sum(scores), counted = warp_sum(counted), all = warp_sum(all);
  const double mean = counted / scores, lse = largest + log(exps), length = all / r.choices;
  const double of_shares = weight * r.balance / scores, of_lse = weight * 2.0 * r.z * length * lse / exps;
  E* d = d_logits + t * r.experts;
  for (int e = lane; e < r.experts; e += 32) {
    const double part = exp(double(x[e]) - largest), sigmoid = r.sigmoid ? sigmoid_of(x[e]) : 0.0;
    const double slope = r.sigmoid ? sigmoid * (1.0 - sigmoid) : part;
    store(d + e, float(load(d + e) + (of_shares * slope * (n[e] - mean) + of_lse * part) / r.sharers));
  }
  if (lane == 0) losses[t] = weight * (r.balance * mean + r.z * length * lse * lse);
}

}  // namespace

/// counts[S,E], zeros before, += 1 for each of n choices, of a token's sequence and of the expert: whole numbers, the
/// same in whatever order they are added up to 2^24. sequences[n / c], -1: of none. A thread per choice.
extern "C" __global__ void expert_counts(const int32_t* chosen, const int32_t* sequences, float* counts, int n, int c,
                                         int E) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int s = sequences[i / c];
  if (s >= 0) atomicAdd(counts + int64_t(s) * E + chosen[i], 1.0f);
}

/// Grid: T warps. losses[T]: of each token, for router_loss_sum.
#define HB_ROUTER_LOSS(E, name)                                                                              \
  extern "C" __global__ void router_loss_##name(                                                             \
      E* d_logits, const float* logits, const float* counts, const int32_t* sequences, const float* weights, \
      double* losses, int T, double balance, double z, int experts, int choices, int sigmoid, int sharers) { \
    router_loss(d_logits, logits, counts, sequences, weights, losses, T,                                     \
                {balance, z, experts, choices, sigmoid, sharers});                                           \
  }
HB_ROUTER_LOSS(float, f32)
HB_ROUTER_LOSS(bf16, bf16)

/// metrics[loss_at] and metrics[router_loss_at] += the sum of losses[T]. One block.
extern "C" __global__ void router_loss_sum(const double* losses, float* metrics, int T, int loss_at,
                                           int router_loss_at) {
  __shared__ double part[32];
  double sum = 0;
  for (int t = threadIdx.x; t < T; t += blockDim.x) sum += losses[t];
  const float found = float(block_sum(sum, part));
  if (threadIdx.x == 0) metrics[loss_at] += found, metrics[router_loss_at] += found;
}
