#include "base/rng.h"

#include <cmath>
#include <numbers>

namespace hotbunk {

std::array<double, 2> normal2(std::uint64_t seed, RngPurpose purpose, std::uint64_t a, std::uint64_t b) {
  const Philox4 w = random_words(seed, purpose, a, b);
  const double radius = std::sqrt(-2.0 * std::log(uniform53(w[0], w[1])));
  const double angle = 2.0 * std::numbers::pi * uniform53(w[2], w[3]);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace hotbunk
