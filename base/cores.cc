#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

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

std::string allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  std::string out;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return out;
  for (int core = 0; core < CPU_SETSIZE; ++core) out += CPU_ISSET(core, &allowed) ? '1' : '0';
  out.erase(out.find_last_of('1') + 1);
  return out;
}

std::int64_t cores_of_rank(const std::string& mine, std::span<const std::string> of_host, std::int64_t usable) {
  const auto may_run_on = [](const std::string& cores, std::size_t core) {
    return core < cores.size() && cores[core] == '1';
  };
  double share = 0.0;
  std::vector<bool> sharing(of_host.size());
  for (std::size_t core = 0; core < mine.size(); ++core) {
    if (mine[core] != '1') continue;
    int ranks = 0;
    for (std::size_t r = 0; r < of_host.size(); ++r)
      if (may_run_on(of_host[r], core)) ++ranks, sharing[r] = true;
    share += 1.0 / std::max(1, ranks);
  }
  const auto sharers = std::max<std::int64_t>(1, std::ranges::count(sharing, true));
  const auto whole = static_cast<std::int64_t>(share + 1e-6);  // six thirds are two
  return std::max<std::int64_t>(1, usable < std::ranges::count(mine, '1') ? std::min(whole, usable / sharers) : whole);
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
