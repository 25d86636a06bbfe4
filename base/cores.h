// How many cores this process may use.
#pragma once
#include <cstdint>

namespace hotbunk {

/// At least 1: the cores it may run on (affinity), or the cgroup's quota where that is lower. hardware_concurrency()
/// knows nothing of quotas.
std::int64_t local_cores();

/// Seconds that all programs together have kept the cores of this process's affinity busy since the machine started;
/// the clock's ticks are 10 ms. 0: unknown.
double busy_core_seconds();

}  // namespace hotbunk
