// How many cores this process may use.
#pragma once
#include <cstdint>

namespace hotbunk {

/// At least 1: the cores it may run on (affinity), or the cgroup's quota where that is lower. hardware_concurrency()
/// knows nothing of quotas.
std::int64_t local_cores();

}  // namespace hotbunk
