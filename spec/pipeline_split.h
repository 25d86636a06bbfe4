// How many layers each chunk of a pipeline holds, in whichever way that is asked for: evenly, by a list, by what the
// first and the last stage have, or with the embedding and the loss counted as layers (Megatron-LM's options).
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

struct PipelineSplit {
  std::int64_t layers = 0;
  std::int64_t stages = 1;             // PP
  std::int64_t chunks = 1;             // VPP: model chunks per stage; chunk c of stage p is virtual stage c * PP + p
  std::optional<std::int64_t> first;   // layers of the first stage, all its chunks together
  std::optional<std::int64_t> last;    // layers of the last stage
  std::vector<std::int64_t> custom;    // layers of every virtual stage in model order; excludes the settings around it
  bool account_for_embedding = false;  // the embedding counts as one layer of the first virtual stage
  bool account_for_loss = false;       // the head and loss count as one layer of the last virtual stage
};

/// Layers of every virtual stage, in model order.
/// Errors: E244 what does not divide, is negative or contradicts, with the arithmetic.
Result<std::vector<std::int64_t>> pipeline_counts(const PipelineSplit&);

/// What a scenario asks for of its training pipeline.
PipelineSplit pipeline_split_of(const Scenario&);
/// The same as a list of every virtual stage's layers, in model order; empty: evenly.
std::vector<std::int64_t> split_layers(const Scenario&);
bool is_even(const TrainSpec&);
/// In the place of whatever was asked for; empty: evenly.
void set_split(TrainSpec&, std::vector<std::int64_t> layers);

}  // namespace hotbunk
