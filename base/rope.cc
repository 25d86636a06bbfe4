#include "base/rope.h"

#include <cmath>
#include <numbers>

#include "base/check.h"

namespace hotbunk {

std::vector<float> rope_inv_freq(std::int64_t head_dim, double theta, const std::optional<Llama3RopeScaling>& scaling) {
  HB_CHECK(head_dim % 2 == 0, "head_dim {} is odd", head_dim);
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
    inv_freq[j] = static_cast<float>(f);
  }
  return inv_freq;
}

}  // namespace hotbunk
