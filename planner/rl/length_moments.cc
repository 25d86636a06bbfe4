#include "planner/rl/length_moments.h"

#include <algorithm>
#include <cmath>
#include <utility>

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

double longer_than(const LengthSpec& l, double x) {
  if (x < 1.0) return 1.0;
  const double most = std::max(l.max, l.mean);
  if (x >= most) return 0.0;
  if (l.distribution == LengthDistribution::uniform) return std::clamp(1.0 - x / (2.0 * l.mean - 1.0), 0.0, 1.0);
  if (l.distribution == LengthDistribution::fixed || l.cv <= 0.0) return x < l.mean ? 1.0 : 0.0;
  const double variance = std::log1p(l.cv * l.cv);  // of the logarithm
  return 0.5 * std::erfc((std::log(x / l.mean) + 0.5 * variance) / std::sqrt(2.0 * variance));
}

DrainSteps drain_steps(const LengthSpec& l, double sequences, double slots, double engines) {
  const double mean = std::max(l.mean, 1.0), rounds = sequences / std::max(slots, 1.0);
  DrainSteps out;
  if (rounds > 1.0) {
    const double spread = std::sqrt(std::max(0.0, mean_square(l) / (mean * mean) - 1.0));
    // Below a spread of 0.3 the ends of a round lie closer together than the rounds.
    const double mixed = std::min(1.0, spread / 0.3), waves = std::ceil(rounds) - 1.0;
    const double renewed = rounds - 1.0 + 0.5 * std::max(0.0, 1.0 - spread * spread);
    out.full = mean * std::min((1.0 - mixed) * waves + mixed * renewed, rounds);
  }
  // Admitted at the start, and over the time until the last admission; every share has its own moment.
  constexpr std::pair<double, double> admitted[] = {{0.4, 0.3}, {0.65, 0.3}, {0.9, 0.3}, {1.0, 0.1}};
  const double later = std::max(0.0, sequences - slots), first = sequences - later;
  const auto running = [&](double x) {
    double n = first * longer_than(l, x);
    for (const auto& [when, share] : admitted)
      if (later > 0.0) n += later * share * longer_than(l, x - when * out.full);
    return engines * n;
  };
  out.all = out.full + mean;
  out.running.fill(1.0);
  if (longer_than(l, 1.01 * mean) <= 0.0) return out;  // no spread
  // The mean of the last end: the integral of P(something still runs) = 1 - e^-(expected to run).
  constexpr int pieces = 48;
  const double width = std::max(l.max, mean) / pieces;
  double last = out.full;
  for (int i = 0; i < pieces; ++i) last -= width * std::expm1(-running(out.full + (i + 0.5) * width));
  out.all = std::max(out.all, last);
  for (std::size_t i = 0; i < out.running.size(); ++i)
    out.running[i] = running(out.full + (out.all - out.full) * (static_cast<double>(i) + 0.5) / 4.0);
  return out;
}

}  // namespace hotbunk
