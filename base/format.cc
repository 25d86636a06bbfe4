#include "base/format.h"

#include <fmt/format.h>

#include <cmath>

namespace hotbunk {

std::string format_bytes(double bytes) {
  const double size = std::abs(bytes);
  if (size >= gib) return fmt::format("{:.2f} GiB", bytes / gib);
  if (size >= mib) return fmt::format("{:.2f} MiB", bytes / mib);
  if (size >= kib) return fmt::format("{:.1f} KiB", bytes / kib);
  return fmt::format("{:.0f} B", bytes);
}

std::string format_seconds(double seconds) {
  const double size = std::abs(seconds);
  if (size >= 1.0) return fmt::format("{:.2f} s", seconds);
  if (size >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.1f} us", seconds * 1e6);
}

std::string format_count(std::int64_t count) {
  std::string digits = fmt::format("{}", count);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (count < 0 ? 1 : 0); at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

}  // namespace hotbunk
