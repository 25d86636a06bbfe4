// Which layers each pipeline stage holds. However the split is asked for, it tiles the layers exactly.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/diagnostic.h"
#include "layout/shard.h"

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

struct StageChunk {
  std::int64_t stage = 0, chunk = 0;
  Range layers;
  friend bool operator==(const StageChunk&, const StageChunk&) = default;
};

/// The chunks in model order; chunk i holds [sum of the counts before it, + its own).
/// Errors: E244 what does not divide, is negative or contradicts, with the arithmetic.
Result<std::vector<StageChunk>> split_pipeline(const PipelineSplit&);

}  // namespace hotbunk
