// The OpenMP teams of ranks: how large they are, and how they wait between their parallel regions.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Of each of `ranks` on this host: the threads asked for, or (0) its share of the cores.
std::int64_t threads_of_rank(std::int64_t ranks, std::int64_t threads, std::int64_t cores);

/// E710 where a rank computes on more threads than OpenMP gives a team of it (OMP_THREAD_LIMIT).
Status check_thread_limit(std::int64_t threads, std::int64_t most);

/// Variables for the processes that are `ranks` on this host, of so many threads each (0: their share). Ranks share the
/// cores, so an idle team does not spin on them (OMP_WAIT_POLICY passive). Where every thread has a core, it does for
/// some 80 us before it sleeps (GOMP_SPINCOUNT, of libgomp): waking one that sleeps takes 50 us, which is as long as a
/// product of a decode step (docs/benchmarks.md).
std::vector<std::pair<std::string, std::string>> team_waits(std::int64_t ranks, std::int64_t threads,
                                                            std::int64_t cores);

}  // namespace hotbunk
