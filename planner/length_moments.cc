#include "planner/length_moments.h"

#include <algorithm>
#include <cmath>

namespace hotbunk {
namespace {

/// z with P(Z <= z) = p of a standard normal, 0 < p < 1.
double normal_quantile(double p) {
  double low = -10.0, high = 10.0;
  for (int i = 0; i < 60; ++i) {
    const double z = 0.5 * (low + high);
    (0.5 * std::erfc(-z / std::sqrt(2.0)) < p ? low : high) = z;
  }
  return 0.5 * (low + high);
}

}  // namespace

double mean_square(const LengthSpec& l) {
  const double square = l.mean * l.mean;
  if (l.distribution == LengthDistribution::fixed) return square;
  // Integers of [1, 2 mean - 1] have the variance ((2 mean - 1)^2 - 1) / 12 = mean (mean - 1) / 3.
  const double whole = l.distribution == LengthDistribution::uniform ? square + l.mean * (l.mean - 1.0) / 3.0
                                                                     : square * (1.0 + l.cv * l.cv);
  return std::clamp(whole, square, std::max(square, l.mean * l.max));
}

double longest_of(const LengthSpec& l, double n) {
  const double p = n / (n + 1.0), most = std::max(l.max, l.mean);
  double longest = l.mean;
  if (l.distribution == LengthDistribution::uniform) {
    longest = p * (2.0 * l.mean - 1.0);
  } else if (l.distribution == LengthDistribution::lognormal) {
    const double variance = std::log1p(l.cv * l.cv);  // of the logarithm
    longest = l.mean * std::exp(-0.5 * variance + std::sqrt(variance) * normal_quantile(p));
  }
  return std::clamp(longest, l.mean, most);
}

}  // namespace hotbunk
