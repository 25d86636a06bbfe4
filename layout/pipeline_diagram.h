// The usual picture of a pipeline: what each stage does when, if a forward pass takes one unit of time on all of them,
// a backward pass two, and messages none.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layout/pipeline_schedule.h"

namespace hotbunk {

/// A pass of a stage, in units of time.
struct PlayedPass {
  PipelineBlock what = PipelineBlock::forward;  // or backward, or weights: gradients that a backward pass left behind
  std::int64_t micro = 0, chunk = 0;
  std::int64_t begin = 0, end = 0;
};
struct PlayedPipeline {
  std::vector<std::vector<PlayedPass>> stages;
  std::int64_t units = 0;  // from the first pass to the last
  /// Of all stages' time, what they wait: (p - 1) / (m + p - 1) in 1F1B and GPipe.
  double bubble = 0.0;
};
PlayedPipeline play_pipeline(const Pipeline&, std::int64_t micro_batches);

/// A line for each stage:
///   stage 0  0  1  .  .  0'    .  1'
///   stage 1  .  0  0'    1  1'
/// micro-batch 0 forward, 0' backward, . waits; 0a in the first of several chunks, 0" its weights' gradients.
std::string pipeline_diagram(const Pipeline&, std::int64_t micro_batches);

}  // namespace hotbunk
