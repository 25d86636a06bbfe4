// From logits to losses: log-probs of tokens, their gradient, and the clipped policy loss (GRPO, PPO) or SFT.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// fp32 logits[T, ld], of which the first `vocab` columns are real tokens: ids first … first + vocab − 1.
struct Logits {
  const float* data = nullptr;
  std::int64_t ld = 0;
  std::int64_t vocab = 0;
  std::int64_t first = 0;  // 0 where the whole vocabulary is there
};

/// With z = logits/temperature:  lse[t] = log Σ_j exp z[t,j];  logp[t] = z[t, target[t]] − lse[t];
/// entropy[t] = lse[t] − Σ_j softmax(z)_j z_j (nullptr = not wanted). Rows with target < 0 are ignored: logp, lse and
/// entropy are 0. temperature > 0. Batch-invariant.
void token_logprobs(KernelContext&, Logits, const std::int32_t* targets, float temperature, float* logp, float* lse,
                    float* entropy, std::int64_t T);

/// What a part of the vocabulary adds to a row's log-prob; zeros in ignored rows.
struct VocabStats {
  float max;       // of its logits; the lowest number there is where it has none
  float sum;       // Σ_j exp((x_j − max)/temperature)
  float weighted;  // Σ_j of that times (x_j − max)/temperature
  float target;    // the target's logit; 0 where another part has it
};
static_assert(sizeof(VocabStats) == 4 * sizeof(float));
/// stats[T] of these logits.
void vocab_stats(KernelContext&, Logits, const std::int32_t* targets, float temperature, VocabStats* stats,
                 std::int64_t T);
/// token_logprobs from the stats[parts, T] of all parts of the vocabulary, in their order.
void merge_vocab_stats(KernelContext&, const VocabStats* stats, std::int64_t parts, const std::int32_t* targets,
                       float temperature, float* logp, float* lse, float* entropy, std::int64_t T);

/// dlogits[t,j] = dlogp[t]/temperature · (1[j = target[t]] − softmax(z)_j); zeros in ignored rows and in columns
/// [vocab, width). `lse` is over the whole vocabulary, also where the logits are a part of it. dlogits: [T, width] fp32
/// or bf16; fp32 may be the logits themselves (in place). With a `softcap` c > 0 the logits are c·tanh(x/c), and the
/// gradient is x's.
void token_logprobs_backward(KernelContext&, Logits, const std::int32_t* targets, float temperature, const float* lse,
                             const float* dlogp, Matrix dlogits, std::int64_t width, std::int64_t T,
                             float softcap = 0.0f);

/// Per-token inputs of the policy loss, fp32 [T]. `weight` already holds the 1/(number of tokens) of the chosen mean;
/// a token with weight 0 is masked: nothing of it is read into loss, gradient or metrics.
struct PolicyLossInputs {
  const float* logp_new = nullptr;
  const float* logp_old = nullptr;   // nullptr: SFT, loss = −weight·logp_new
  const float* logp_ref = nullptr;   // nullptr: no KL to a reference
  const float* advantage = nullptr;  // not read for SFT
  const float* weight = nullptr;
  const float* entropy = nullptr;  // nullptr: metric entropy stays
};

struct PolicyLossConfig {
  float clip_low = 0.2f;  // ratio is clipped to [1 − clip_low, 1 + clip_high]
  float clip_high = 0.2f;
  float kl_coef = 0.0f;  // weight of k3(ref)
};

/// Positions in the metrics array. All are sums that the call *adds to* (so micro-batches and ranks add up), but
/// max_abs_diff, which is a maximum.
enum PolicyMetric : int {
  kLoss = 0,        // Σ weight·(policy + kl_coef·k3)
  kPolicyLoss = 1,  // Σ weight·policy,  policy = max(−A·r, −A·clip(r)), r = exp(new − old)
  kKlRef = 2,       // Σ weight·k3,  k3 = exp(ref − new) − (ref − new) − 1
  kKlOld = 3,       // Σ weight·(old − new)
  kClipped = 4,     // number of tokens whose clipped branch is the larger (no gradient)
  kTokens = 5,      // number of tokens with weight ≠ 0
  kEntropy = 6,     // Σ weight·entropy
  kSumAbsDiff = 7,  // Σ |new − old|
  kMaxAbsDiff = 8,  // max |new − old|
  kNumPolicyMetrics = 9,
};

/// dlogp[T] = ∂loss/∂logp_new (0 where masked); metrics: fp32 [8], summed in double in fixed order.
void policy_loss(KernelContext&, const PolicyLossInputs&, const PolicyLossConfig&, float* dlogp, float* metrics,
                 std::int64_t T);

}  // namespace hotbunk::kernels
