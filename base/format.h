// Numbers as users read them: GiB for memory, GB/s for bandwidth, always with the unit.
#pragma once
#include <cstdint>
#include <string>

namespace hotbunk {

constexpr double kib = 1024.0, mib = 1024.0 * kib, gib = 1024.0 * mib;

/// "12.41 GiB", "512 KiB", "17 B": three significant places, binary units.
std::string format_bytes(double bytes);
/// "1.23 s", "45.6 ms", "7.8 us".
std::string format_seconds(double seconds);
/// "1,234,567"
std::string format_count(std::int64_t count);

}  // namespace hotbunk
