// When the stages of a pipeline are through with their passes, by playing the row of blocks that they meet in
// (layout/pipeline_schedule.h): what the closed form of a schedule's bubble takes where it depends on how many
// micro-batches there are and on how long each kind of pass takes.
#pragma once
#include <span>
#include <vector>

#include "layout/pipeline_schedule.h"

namespace hotbunk {

/// One full micro-batch on a stage, seconds; weight_grad: what no other stage waits for, beside `backward`.
struct StagePasses {
  double forward = 0, backward = 0, weight_grad = 0;
};

/// Seconds from the first stage's first pass until each stage is through. Messages take no time: they are exchanged when
/// both sides are there. `last_share`: the last micro-batch's part of a full one. Of many micro-batches those of the
/// steady state take what the slowest stage does. Assumes: one chunk a stage, not GPipe.
std::vector<double> stages_through(const Pipeline&, std::span<const StagePasses> of_stages, std::int64_t micro_batches,
                                   double last_share);

}  // namespace hotbunk
