// What `run` asks of its input before any rank starts.
#pragma once
#include <string>

#include "base/diagnostic.h"

namespace hotbunk {

/// E101 for standard input: each rank reads the scenario itself.
Status readable_by_every_rank(const std::string& scenario);

/// Errors about a scenario's own keys, which know no file, get the scenario's.
Diagnostics with_file(Diagnostics, const std::string& scenario);

}  // namespace hotbunk
