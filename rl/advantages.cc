#include "rl/advantages.h"

#include <cmath>
#include <numeric>

#include "base/check.h"

namespace hotbunk {

namespace {
constexpr double std_epsilon = 1e-6;  // of verl's and TRL's GRPO: a group of equal rewards has advantage 0
}

std::vector<float> group_advantages(std::span<const double> rewards, std::int64_t group_size, bool normalize_std) {
  const auto n = static_cast<std::size_t>(group_size);
  HB_CHECK(n >= 1 && rewards.size() % n == 0, "{} rewards in groups of {}", rewards.size(), n);
  std::vector<float> advantages;
  for (std::size_t begin = 0; begin < rewards.size(); begin += n) {
    const auto group = rewards.subspan(begin, n);
    const double mean = std::accumulate(group.begin(), group.end(), 0.0) / static_cast<double>(n);
    double scale = 1.0;
    if (normalize_std && n > 1) {
      double squares = 0.0;
      for (double r : group) squares += (r - mean) * (r - mean);
      scale = 1.0 / (std::sqrt(squares / static_cast<double>(n - 1)) + std_epsilon);
    }
    for (double r : group) advantages.push_back(static_cast<float>((r - mean) * scale));
  }
  return advantages;
}

}  // namespace hotbunk
