#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

namespace hotbunk {

std::int64_t local_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const std::int64_t cores = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  std::ifstream quota("/sys/fs/cgroup/cpu.max");  // "200000 100000" or "max 100000"
  std::int64_t used = 0, period = 0;
  if (!(quota >> used >> period) || used <= 0 || period <= 0) return cores;
  return std::min(cores, std::max<std::int64_t>(1, used / period));
}

}  // namespace hotbunk
