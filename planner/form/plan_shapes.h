// The shapes that a plan's bytes are made of, as tables of one model: layers are alike, so one unit stands for all of
// them, and one list of rectangles for the rollout weights of each tensor-parallel rank.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "base/dtype.h"
#include "layout/shard.h"
#include "spec/model.h"

namespace hotbunk {

/// One parameter of a unit, logical shape.
struct ParamShape {
  std::int64_t rows = 0, cols = 0;
};

/// More than any unit of a dense decoder has: norms 2, projections 7, biases 3, head norms 2.
inline constexpr std::size_t max_unit_params = 16;

/// One FSDP unit (layout/train_weights.h), its parameters in the unit's order.
struct UnitShape {
  std::array<ParamShape, max_unit_params> params{};
  std::size_t count = 0;
  std::int64_t elements = 0;  // sum of rows * cols
};

/// What one tensor-parallel rank of a rollout engine takes of each parameter, by the index in its unit.
struct RankSlice {
  std::array<Piece, max_unit_params> root{}, layer{};
};

/// Rollout weights of engines of `tp` ranks. Sizes are the same on every rank: a short vocabulary part is padded.
struct EngineSlices {
  std::int64_t tp = 1, heads = 0, kv_heads = 0, vocab_rows = 0;  // of one rank
  std::vector<std::int64_t> root_buffers, layer_buffers;         // elements of each weight buffer
  std::vector<RankSlice> ranks;

  std::int64_t elements(std::int64_t layers) const;
  /// Bytes of the section that holds them, every buffer aligned, before rounding to chunks.
  std::int64_t section_bytes(std::int64_t layers, DType) const;
};

/// Built once per model; the searches share it.
struct PlanShapes {
  std::int64_t layers = 0;
  UnitShape root, layer;
  std::vector<EngineSlices> engines;  // ascending tp: every one that the heads allow

  /// Dense decoders only (why_not_rollout_tp(model, 1) is empty).
  explicit PlanShapes(const ModelSpec&);
  const EngineSlices* engine(std::int64_t tp) const;  // nullptr: the heads do not allow it
  std::int64_t elements() const { return root.elements + layers * layer.elements; }
  /// What one rank contributes to a verified sync: two 8-byte sums per parameter.
  std::int64_t sync_hash_bytes() const {
    return 2 * 8 * static_cast<std::int64_t>(root.count + static_cast<std::size_t>(layers) * layer.count);
  }
};

/// The same over `world` ranks: Shard(0) pads each parameter to equal parts.
struct ShardedShapes {
  struct Unit {
    std::array<std::int64_t, max_unit_params> rows{};  // of each parameter in one rank's shard, ceil(rows / world)
    std::int64_t elements = 0;                         // of the shard
  };
  const PlanShapes& shapes;
  std::int64_t world = 1;
  Unit root, layer;

  ShardedShapes(const PlanShapes&, std::int64_t world);
  /// Elements of one rank's shards of the model.
  std::int64_t elements() const { return root.elements + shapes.layers * layer.elements; }
};

/// The buckets of one sync (lowering/sync.cc: rows of padded shards, greedily, in the order of the units).
struct SyncBuckets {
  std::int64_t count = 0;
  std::int64_t largest_elements = 0;  // of one rank's part of the fullest bucket
  std::int64_t wanted = 0;            // buckets that hold something of `slice`
};

/// `slice`: whose wanted buckets are counted. Costs one step per parameter of each layer that a bucket's end falls
/// into; depends on nothing else, so a search computes it once for each (world, bucket, dtype).
SyncBuckets fill_sync_buckets(const ShardedShapes&, std::int64_t bucket_bytes, DType, const RankSlice& slice);

/// What a sync from the host copies up: so many times so many elements. A bucket's rows of one unit come together.
std::map<std::int64_t, std::int64_t> sync_uploads(const ShardedShapes&, std::int64_t bucket_bytes, DType);

/// Buffers of an arena stand at multiples of this (graph/lifetimes.cc).
constexpr std::int64_t aligned_bytes(std::int64_t bytes) { return round_up(bytes, 64); }

}  // namespace hotbunk
