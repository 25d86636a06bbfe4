// Which layers each pipeline stage holds. However the split is asked for, it tiles the layers exactly.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
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

/// What one pipeline stage has of a model: the layers of its chunks, in model order; in front of them the embedding, if
/// it is the first; behind them the norm and the head, if it is the last. Tied, both have the table.
struct StagePart {
  std::vector<Range> layers;
  bool first = true, last = true;
  bool has_layer(std::int64_t layer) const {
    return std::ranges::any_of(layers, [&](const Range& r) { return r.begin <= layer && layer < r.end; });
  }
  friend bool operator<(const StagePart& a, const StagePart& b) {
    const auto less = [](const Range& x, const Range& y) {
      return std::tie(x.begin, x.end) < std::tie(y.begin, y.end);
    };
    if (a.layers != b.layers) return std::ranges::lexicographical_compare(a.layers, b.layers, less);
    return std::tie(a.first, a.last) < std::tie(b.first, b.last);
  }
};

}  // namespace hotbunk
