// Which layers each pipeline stage holds. However the split is asked for, it tiles the layers exactly.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "base/diagnostic.h"
#include "layout/shard.h"
#include "spec/pipeline_split.h"

namespace hotbunk {

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
