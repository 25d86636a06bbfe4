// What a launch costs the host.
#pragma once
#include "backends/cuda/context.h"

namespace hotbunk::cuda {

/// Seconds of the calling thread per kernel, of many in a row on one stream, which the device has not caught up with.
double launch_seconds(const Context&);

}  // namespace hotbunk::cuda
