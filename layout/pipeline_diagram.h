// The usual picture of a pipeline: what each stage does when, if a forward pass takes one unit of time on all of them,
// a backward pass two, and messages none.
#pragma once
#include <cstdint>
#include <string>

#include "layout/pipeline_turns.h"

namespace hotbunk {

/// A line for each stage:
///   stage 0  0  1  .  .  0'    .  1'
///   stage 1  .  0  0'    1  1'
/// micro-batch 0 forward, 0' backward, . waits; 0a in the first of several chunks, 0" its weights' gradients.
std::string pipeline_diagram(const Pipeline&, std::int64_t micro_batches);

}  // namespace hotbunk
