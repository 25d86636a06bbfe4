#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

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

double busy_core_seconds() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0.0;
  std::ifstream stat("/proc/stat");  // "cpu0 user nice system idle iowait irq softirq steal …"
  double ticks = 0.0;
  for (std::string line; std::getline(stat, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    if (!name.starts_with("cpu") || name == "cpu") continue;
    const int core = std::atoi(name.c_str() + 3);
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &allowed)) continue;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, interrupts = 0, soft_interrupts = 0, stolen = 0;
    fields >> user >> nice >> system >> idle >> waiting >> interrupts >> soft_interrupts >> stolen;
    ticks += user + nice + system + interrupts + soft_interrupts + stolen;
  }
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace hotbunk
