// What `run` asks of its input before any rank starts, and which of its processes speaks.
#pragma once
#include <string>

#include "base/diagnostic.h"
#include "runtime/launch.h"

namespace hotbunk {

/// Of a run's processes rank 0 writes stdout's document. Whether it ended by itself, and so has said what it had to
/// say; else the launcher speaks.
bool rank_0_spoke(const LaunchResult&);

/// E101 for standard input: each rank reads the scenario itself.
Status readable_by_every_rank(const std::string& scenario);

/// Errors about a scenario's own keys, which know no file, get the scenario's.
Diagnostics with_file(Diagnostics, const std::string& scenario);

}  // namespace hotbunk
