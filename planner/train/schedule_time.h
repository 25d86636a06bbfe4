// When the stages of a pipeline are through with their passes, by playing the row of blocks that they meet in
// (layout/pipeline_schedule.h): what the closed form of a schedule's bubble takes where it depends on how many
// micro-batches there are, on how long each kind of pass takes, and on what a message can hide behind.
#pragma once
#include <span>
#include <vector>

#include "layout/pipeline_schedule.h"

namespace hotbunk {

/// One full micro-batch on a stage, seconds; weight_grad: what no other stage waits for, beside `backward`. `beside`:
/// of a pass, its end that runs while what it made is already under way.
struct StagePasses {
  double forward = 0, backward = 0, weight_grad = 0;
  double beside = 0;
};

/// Seconds from the first stage's first pass until each stage is through. A message begins when both sides are there
/// and takes `message` seconds, in which neither begins a pass; weight gradients that were left for later run beside
/// it. `last_share`: the last micro-batch's part of a full one. Of many micro-batches those of the steady state take
/// what they take in the middle of the played ones. Assumes: not GPipe; rows of interleaved micro-batches are full.
std::vector<double> stages_through(const Pipeline&, std::span<const StagePasses> of_stages, std::int64_t micro_batches,
                                   double last_share, double message = 0.0);

}  // namespace hotbunk
