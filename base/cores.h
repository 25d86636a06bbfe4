// How many cores this process may use.
#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace hotbunk {

/// At least 1: the cores it may run on (affinity), or the cgroup's quota where that is lower. hardware_concurrency()
/// knows nothing of quotas.
std::int64_t local_cores();

/// The cores that the calling thread may run on: "1101" are 0, 1 and 3.
std::string allowed_cores();

/// Cores for one of several ranks of a host, at least 1: of each that it may run on its share, by how many of the
/// ranks may. A launcher that binds each to cores of its own leaves them whole.
///   mine     allowed_cores() of the rank; of_host: of all ranks of the host, this one among them
///   usable   its local_cores(): a quota below its cores is one of all that share any with it
std::int64_t cores_of_rank(const std::string& mine, std::span<const std::string> of_host, std::int64_t usable);

/// Seconds that all programs together have kept the cores of this process's affinity busy since the machine started;
/// the clock's ticks are 10 ms. 0: unknown.
double busy_core_seconds();

}  // namespace hotbunk
