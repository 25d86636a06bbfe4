#include "planner/train/token_load.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace hotbunk {
namespace {

/// z with P(Z > z) = p of a standard normal, 0 < p <= 1/2. Abramowitz and Stegun 26.2.23 (4.5e-4), then Newton's
/// method on the tail itself, twice: searches ask this of every point, so there is no loop until it converges.
double upper_quantile(double p) {
  const double t = std::sqrt(-2.0 * std::log(p));
  double z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  for (int i = 0; i < 2; ++i) {
    const double density = std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi);
    z += (0.5 * std::erfc(z / std::numbers::sqrt2) - p) / density;
  }
  return z;
}

}  // namespace

TokenLoad::TokenLoad(const SequenceLengths& l, double count)
    : mean_(count * l.mean),
      most_(count * std::max(l.longest, l.mean)),
      log_variance_(mean_ > 0.0 ? std::log1p(count * l.variance / (mean_ * mean_)) : 0.0) {}

double TokenLoad::exceeds(double tokens) const {
  if (tokens >= most_) return 0.0;
  if (tokens <= 0.0) return 1.0;
  if (log_variance_ <= 0.0) return tokens < mean_ ? 1.0 : 0.0;
  return 0.5 * std::erfc((std::log(tokens / mean_) + 0.5 * log_variance_) / std::sqrt(2.0 * log_variance_));
}

double TokenLoad::exceeded_with(double probability) const {
  const double spread = std::sqrt(log_variance_);
  const double tokens = mean_ * std::exp(-0.5 * log_variance_ + spread * upper_quantile(probability));
  return std::clamp(tokens, std::min(mean_, most_), most_);
}

}  // namespace hotbunk
