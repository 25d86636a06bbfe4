#include "base/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace hotbunk {

RampRopeScaling yarn_rope_scaling(std::int64_t head_dim, double theta, double factor, double original_max_position,
                                  double fast, double slow, bool whole) {
  const auto d = static_cast<double>(head_dim);
  const auto pair_of = [&](double rotations) {
    return d * std::log(original_max_position / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
  };
  const double low = pair_of(fast), high = pair_of(slow);
  const double begin = std::max(whole ? std::floor(low) : low, 0.0),
               end = std::min(whole ? std::ceil(high) : high, d - 1.0);
  return {factor, begin, begin == end ? end + 0.001 : end};  // no division by 0, as transformers
}

std::vector<float> rope_inv_freq(std::int64_t head_dim, double theta, const RopeScalingRule& rule) {
  HB_CHECK(head_dim % 2 == 0, "head_dim {} is odd", head_dim);
  const auto* const scaling = std::get_if<Llama3RopeScaling>(&rule);
  const auto* const ramp = std::get_if<RampRopeScaling>(&rule);
  std::vector<float> inv_freq(static_cast<std::size_t>(head_dim / 2));
  for (std::size_t j = 0; j < inv_freq.size(); ++j) {
    double f = 1.0 / std::pow(theta, 2.0 * static_cast<double>(j) / static_cast<double>(head_dim));
    if (scaling) {
      const double wavelength = 2.0 * std::numbers::pi / f;
      const double low = scaling->original_max_position / scaling->low_freq_factor;
      const double high = scaling->original_max_position / scaling->high_freq_factor;
      if (wavelength > low) {
        f /= scaling->factor;
      } else if (wavelength >= high) {
        const double smooth = (scaling->original_max_position / wavelength - scaling->low_freq_factor) /
                              (scaling->high_freq_factor - scaling->low_freq_factor);
        f = (1.0 - smooth) * f / scaling->factor + smooth * f;
      }
    }
    if (ramp) {
      const double divided = std::clamp((static_cast<double>(j) - ramp->begin) / (ramp->end - ramp->begin), 0.0, 1.0);
      f = divided * f / ramp->factor + (1.0 - divided) * f;
    }
    inv_freq[j] = static_cast<float>(f);
  }
  return inv_freq;
}

}  // namespace hotbunk
