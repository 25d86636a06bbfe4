#include "backends/cpu_gloo/kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/softmax.h"

namespace hotbunk::kernels {
namespace {

struct Choice {
  std::int32_t token = 0;
  float logp = 0.0f;
};

float log_prob(const float* x, std::int64_t vocab, float m, float inv, std::int64_t token) {
  const double log_sum = std::log(exp_sums<false>(x, vocab, m, inv).sum);
  return static_cast<float>((static_cast<double>(x[token]) - m) * inv - log_sum);
}

/// The first of the largest: by vectors which few logits it is among, then among those.
std::int64_t first_largest(const float* x, std::int64_t n) {
  constexpr std::int64_t kFew = 256;
  std::int64_t begin = 0;
  float most = row_max(x, std::min(n, kFew));
  for (std::int64_t at = kFew; at < n; at += kFew)
    if (const float m = row_max(x + at, std::min(n - at, kFew)); m > most) most = m, begin = at;
  return std::max_element(x + begin, x + std::min(n, begin + kFew)) - x;
}

Choice greedy(const float* x, std::int64_t vocab) {
  const std::int64_t best = first_largest(x, vocab);
  return {static_cast<std::int32_t>(best), log_prob(x, vocab, x[best], 1.0f, best)};
}

/// The first index whose cumulative probability exceeds u·(total mass); probabilities in the order given by `at`.
template <class At>
std::int64_t inverse_transform(std::int64_t n, double target, At&& at) {
  double cumulative = 0.0;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double p = at(i);
    if (p > 0.0) last = i;
    cumulative += p;
    if (cumulative > target) return i;
  }
  return last;  // rounding left the sum just below the target
}

/// prob: scratch of `vocab`, becomes exp((x − m)/temperature). order: scratch of `vocab`, for truncation.
Choice draw(const float* x, std::int64_t vocab, const SamplingParams& params, float uniform, float* prob,
            std::int32_t* order) {
  const float inv = 1.0f / params.temperature;
  const float m = row_max(x, vocab);
  for_vectors(vocab,
              [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(prob + j, exp((ld(x + j) - m) * inv)); });
  const std::int64_t k = params.top_k > 0 ? std::min<std::int64_t>(params.top_k, vocab) : vocab;
  const bool truncated = k < vocab || params.top_p < 1.0f;
  std::int64_t token = 0;
  if (!truncated) {
    const double mass = std::accumulate(prob, prob + vocab, 0.0);
    token = inverse_transform(vocab, uniform * mass, [&](std::int64_t i) { return prob[i]; });
  } else {
    std::iota(order, order + vocab, 0);
    const auto more_probable = [&](std::int32_t a, std::int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    std::partial_sort(order, order + k, order + vocab, more_probable);
    double mass = 0.0;
    for (std::int64_t i = 0; i < k; ++i) mass += prob[order[i]];
    std::int64_t kept = k;
    if (params.top_p < 1.0f) {  // the smallest prefix with mass ≥ top_p, at least one
      const double wanted = params.top_p * mass;
      double sum = prob[order[0]];
      for (kept = 1; kept < k && sum < wanted; ++kept) sum += prob[order[kept]];
      mass = sum;
    }
    token = order[inverse_transform(kept, uniform * mass, [&](std::int64_t i) { return prob[order[i]]; })];
  }
  return {static_cast<std::int32_t>(token), log_prob(x, vocab, m, inv, token)};
}

}  // namespace

void sample_tokens(KernelContext& ctx, LogitBlocks logits, const SamplingParams& params, const float* uniforms,
                   std::int32_t* tokens, float* logp, std::int64_t S) {
  const std::int64_t vocab = logits.vocab, width = logits.block_width;
  HB_CHECK(vocab > 0 && vocab <= logits.num_blocks * width, "vocabulary {} in {} blocks of {}", vocab,
           logits.num_blocks, width);
  parallel_for(ctx, S, rows_grain(16 * vocab), [&](std::int64_t begin, std::int64_t end) {
    const bool largest = params.temperature == 0.0f, whole = vocab <= width;  // else rows lie in several blocks
    std::vector<float> joined(static_cast<std::size_t>(whole ? 0 : vocab));
    std::vector<float> prob(static_cast<std::size_t>(largest ? 0 : vocab));
    std::vector<std::int32_t> order(prob.size());
    for (std::int64_t s = begin; s < end; ++s) {
      const float* x = whole ? logits.data + s * width : joined.data();
      for (std::int64_t b = 0; !whole && b * width < vocab; ++b)
        std::copy_n(logits.data + (b * S + s) * width, std::min(width, vocab - b * width), joined.data() + b * width);
      const Choice c = largest ? greedy(x, vocab) : draw(x, vocab, params, uniforms[s], prob.data(), order.data());
      tokens[s] = c.token;
      logp[s] = c.logp;
    }
  });
}

}  // namespace hotbunk::kernels
