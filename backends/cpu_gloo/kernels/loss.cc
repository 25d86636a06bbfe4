#include "backends/cpu_gloo/kernels/loss.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/softmax.h"
#include "base/max.h"

namespace hotbunk::kernels {
namespace {

struct TokenLoss {
  double policy = 0.0;
  double k3 = 0.0;
  double d_policy = 0.0;  // ∂policy/∂logp_new
  double d_k3 = 0.0;
  bool clipped = false;
};

/// One token of the clipped surrogate with the k3 estimator of KL(new ‖ ref); SFT where there is no logp_old.
TokenLoss token_loss(const PolicyLossInputs& in, const PolicyLossConfig& config, std::int64_t t) {
  TokenLoss loss;
  const double logp = in.logp_new[t];
  if (!in.logp_old) {
    loss.policy = -logp;
    loss.d_policy = -1.0;
  } else {
    const double advantage = in.advantage[t];
    const double ratio = std::exp(logp - in.logp_old[t]);
    const double free = -advantage * ratio;
    const double bounded = -advantage * std::clamp(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high);
    loss.clipped = bounded > free;
    loss.policy = loss.clipped ? bounded : free;
    loss.d_policy = loss.clipped ? 0.0 : free;  // d ratio / d logp = ratio
  }
  if (in.logp_ref) {
    const double gap = static_cast<double>(in.logp_ref[t]) - logp;
    loss.k3 = std::expm1(gap) - gap;
    loss.d_k3 = -std::expm1(gap);
  }
  return loss;
}

}  // namespace

void token_logprobs(KernelContext& ctx, Logits logits, const std::int32_t* targets, float temperature, float* logp,
                    float* lse, float* entropy, std::int64_t T) {
  HB_CHECK(temperature > 0.0f, "temperature {}", temperature);
  const float inv = 1.0f / temperature;
  parallel_for(ctx, T, rows_grain(8 * logits.vocab), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const bool ignored = targets[t] < 0;
      double row_lse = 0.0, row_entropy = 0.0, row_logp = 0.0;
      if (!ignored) {
        const float* x = logits.data + t * logits.ld;
        const float m = row_max(x, logits.vocab);
        const ExpSums sums =
            entropy ? exp_sums<true>(x, logits.vocab, m, inv) : exp_sums<false>(x, logits.vocab, m, inv);
        const double log_sum = std::log(sums.sum);  // of the row shifted by its maximum: no cancellation below
        row_lse = static_cast<double>(m) * inv + log_sum;
        row_logp = (static_cast<double>(x[targets[t]]) - m) * inv - log_sum;
        row_entropy = log_sum - sums.weighted / sums.sum;
      }
      logp[t] = static_cast<float>(row_logp);
      lse[t] = static_cast<float>(row_lse);
      if (entropy) entropy[t] = static_cast<float>(row_entropy);
    }
  });
}

void vocab_stats(KernelContext& ctx, Logits logits, const std::int32_t* targets, float temperature, VocabStats* stats,
                 std::int64_t T) {
  HB_CHECK(temperature > 0.0f, "temperature {}", temperature);
  const float inv = 1.0f / temperature;
  parallel_for(ctx, T, rows_grain(8 * logits.vocab), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (targets[t] < 0 || logits.vocab <= 0) {
        stats[t] = {targets[t] < 0 ? 0.0f : std::numeric_limits<float>::lowest(), 0.0f, 0.0f, 0.0f};
        continue;
      }
      const float* x = logits.data + t * logits.ld;
      const float m = row_max(x, logits.vocab);
      const ExpSums sums = exp_sums<true>(x, logits.vocab, m, inv);
      const std::int64_t target = targets[t] - logits.first;
      stats[t] = {m, static_cast<float>(sums.sum), static_cast<float>(sums.weighted),
                  target >= 0 && target < logits.vocab ? x[target] : 0.0f};
    }
  });
}

void merge_vocab_stats(KernelContext&, const VocabStats* stats, std::int64_t parts, const std::int32_t* targets,
                       float temperature, float* logp, float* lse, float* entropy, std::int64_t T) {
  const double inv = 1.0 / temperature;
  for (std::int64_t t = 0; t < T; ++t) {
    logp[t] = lse[t] = entropy[t] = 0.0f;
    if (targets[t] < 0) continue;
    const auto part = [&](std::int64_t p) -> const VocabStats& { return stats[p * T + t]; };
    float m = part(0).max, target = part(0).target;
    for (std::int64_t p = 1; p < parts; ++p) {
      m = max_or_nan(m, part(p).max);
      target += part(p).target;
    }
    double sum = 0.0, weighted = 0.0;
    for (std::int64_t p = 0; p < parts; ++p) {
      if (part(p).sum == 0.0f) continue;  // no ids
      const double below = (static_cast<double>(part(p).max) - m) * inv, share = std::exp(below);
      sum += share * part(p).sum;
      weighted += share * (part(p).weighted + below * part(p).sum);
    }
    const double log_sum = std::log(sum);
    logp[t] = static_cast<float>((static_cast<double>(target) - m) * inv - log_sum);
    lse[t] = static_cast<float>(m * inv + log_sum);
    entropy[t] = static_cast<float>(log_sum - weighted / sum);
  }
}

void token_logprobs_backward(KernelContext& ctx, Logits logits, const std::int32_t* targets, float temperature,
                             const float* lse, const float* dlogp, Matrix dlogits, std::int64_t width, std::int64_t T,
                             float softcap) {
  HB_CHECK(temperature > 0.0f && width >= logits.vocab, "temperature {}, width {} of vocabulary {}", temperature, width,
           logits.vocab);
  const float inv = 1.0f / temperature, inv_cap = softcap > 0.0f ? 1.0f / softcap : 0.0f;
  with_float_type(dlogits.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(4 * width), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* d = row<E>(dlogits, t);
        const float g = dlogp[t] * inv;
        if (targets[t] < 0 || g == 0.0f) {
          std::fill_n(d, width, E{});
          continue;
        }
        const float* x = logits.data + t * logits.ld;
        const std::int64_t target = targets[t] - logits.first;
        const bool here = target >= 0 && target < logits.vocab;
        // What a capped logit y gains where what was capped does: 1 − (y/c)².
        const auto slope = [&](auto y) HB_FORCE_INLINE { return 1.0f - y * inv_cap * (y * inv_cap); };
        const float at_target = here ? (g - g * std::exp(x[target] * inv - lse[t])) * slope(x[target]) : 0.0f;
        const float shift = lse[t];
        for_vectors(logits.vocab, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
          const Vf y = ld(x + j);
          st(d + j, exp(y * inv - shift) * -g * slope(y));
        });
        if (here) d[target] = from_f32<E>(at_target);
        std::fill_n(d + logits.vocab, width - logits.vocab, E{});
      }
    });
  });
}

void policy_loss(KernelContext&, const PolicyLossInputs& in, const PolicyLossConfig& config, float* dlogp,
                 float* metrics, std::int64_t T) {
  // One thread: T is thousands, next to T × vocabulary elsewhere; and the sums have one order.
  std::array<double, kNumPolicyMetrics> sums{};
  for (std::int64_t t = 0; t < T; ++t) {
    const double w = in.weight[t];
    dlogp[t] = 0.0f;
    if (w == 0.0) continue;
    const TokenLoss loss = token_loss(in, config, t);
    dlogp[t] = static_cast<float>(w * (loss.d_policy + config.kl_coef * loss.d_k3));
    sums[kLoss] += w * (loss.policy + config.kl_coef * loss.k3);
    sums[kPolicyLoss] += w * loss.policy;
    sums[kKlRef] += w * loss.k3;
    sums[kClipped] += loss.clipped;
    sums[kTokens] += 1.0;
    if (in.entropy) sums[kEntropy] += w * in.entropy[t];
    if (in.logp_old) {
      const double gap = static_cast<double>(in.logp_old[t]) - in.logp_new[t];
      sums[kKlOld] += w * gap;
      sums[kSumAbsDiff] += std::abs(gap);
      sums[kMaxAbsDiff] = max_or_nan(sums[kMaxAbsDiff], std::abs(gap));
    }
  }
  for (int i = 0; i < kNumPolicyMetrics; ++i)
    metrics[i] = i == kMaxAbsDiff ? max_or_nan(metrics[i], static_cast<float>(sums[kMaxAbsDiff]))
                                  : static_cast<float>(metrics[i] + sums[static_cast<std::size_t>(i)]);
}

}  // namespace hotbunk::kernels
