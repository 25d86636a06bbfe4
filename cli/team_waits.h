// How the OpenMP teams of ranks wait between their parallel regions, as variables for the processes that are them.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hotbunk {

/// For `ranks` on this host, of so many threads each (0: their share of its cores). Ranks share the cores, so an idle
/// team does not spin on them (OMP_WAIT_POLICY passive). Where every thread has a core, it does for some 80 us before
/// it sleeps (GOMP_SPINCOUNT, of libgomp): waking one that sleeps takes 50 us, which is as long as a product of a
/// decode step (docs/benchmarks.md).
std::vector<std::pair<std::string, std::string>> team_waits(std::int64_t ranks, std::int64_t threads,
                                                            std::int64_t cores);

}  // namespace hotbunk
