#include "planner/form/plan_shapes.h"

#include <algorithm>
#include <map>
#include <string>

#include "base/check.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"

namespace hotbunk {
namespace {

UnitShape shape_of(const ShardedUnit& unit) {
  UnitShape out;
  HB_CHECK(unit.params.size() <= max_unit_params, "unit {} has {} parameters", unit.name, unit.params.size());
  for (const UnitParam& p : unit.params) out.params[out.count++] = {p.rows, p.cols};
  out.elements = unit.full_elements;
  return out;
}

/// Where each parameter of the two units stands: its name -> (of a layer, index).
using Places = std::map<std::string, std::pair<bool, std::size_t>>;

EngineSlices slices_of(const ModelSpec& thin, std::int64_t tp, const Places& places) {
  const HeadRanges heads = heads_of_rank(thin, tp, 0);
  EngineSlices out{.tp = tp,
                   .heads = heads.query.size(),
                   .kv_heads = heads.key_value.size(),
                   .vocab_rows = ceil_div(thin.vocab, tp),
                   .root_buffers = {},
                   .layer_buffers = {},
                   .ranks = {}};
  for (std::int64_t rank = 0; rank < tp; ++rank) {
    RankSlice slice;
    for (const LocalWeight& w : rollout_weights(thin, tp, rank)) {
      if (rank == 0) (w.layer < 0 ? out.root_buffers : out.layer_buffers).push_back(w.elements());
      for (const auto& source : w.sources) {
        const auto [of_layer, index] = places.at(source.parameter);
        (of_layer ? slice.layer : slice.root)[index] = source.piece;
      }
    }
    out.ranks.push_back(slice);
  }
  return out;
}

/// How many of the windows [first + i size, first + (i + 1) size), 0 <= i < count, meet [begin, end): a range of i.
Range windows_meeting(std::int64_t first, std::int64_t size, std::int64_t count, std::int64_t begin, std::int64_t end) {
  if (begin >= end || end <= first || count <= 0) return {0, 0};
  const std::int64_t from = std::max<std::int64_t>(0, (begin - first) / size);
  const std::int64_t to = std::min(count, (end - 1 - first) / size + 1);
  return begin < first ? Range{0, std::max<std::int64_t>(to, 0)} : Range{from, std::max(from, to)};
}

/// The greedy filling, one parameter at a time in constant time.
class Filling {
 public:
  explicit Filling(std::int64_t capacity) : capacity_(capacity) {}

  void add(const UnitShape& unit, const ShardedShapes::Unit& shard, const std::array<Piece, max_unit_params>& wanted) {
    for (std::size_t i = 0; i < unit.count; ++i) add({shard.rows[i], unit.params[i].cols}, wanted[i]);
  }

  /// As many whole units as the open bucket still holds, `most` at most; returns how many.
  std::int64_t add_whole(const ShardedShapes::Unit& shard, std::int64_t most) {
    if (fill_ + shard.elements > capacity_) return 0;
    const std::int64_t units = std::min(most, (capacity_ - fill_) / shard.elements);
    // Every rank's slice holds something of every layer (its norms).
    fill_ += units * shard.elements, wanted_ = true;
    return units;
  }

  SyncBuckets finish() {
    close();
    return out_;
  }

 private:
  /// `p`: as it lies in one rank's shard.
  void add(const ParamShape& p, const Piece& wanted) {
    const std::int64_t rows = p.rows;
    if (fill_ + rows * p.cols <= capacity_) return put(p, wanted, 0, rows);
    std::int64_t done = 0;
    if (fill_ > 0) {
      done = std::clamp<std::int64_t>((capacity_ - fill_) / p.cols, 0, rows);
      if (done > 0) put(p, wanted, 0, done);
      if (done == rows) return;
      close();
    }
    // Whole buckets of nothing but this parameter, then what is left.
    const std::int64_t size = std::max<std::int64_t>(1, capacity_ / p.cols);
    const std::int64_t whole = ceil_div(rows - done, size) - 1;
    if (whole > 0) {
      out_.count += whole;
      out_.largest_elements = std::max(out_.largest_elements, size * p.cols);
      out_.wanted += meeting(p, wanted, done, size, whole);
      done += whole * size;
    }
    put(p, wanted, done, rows);
  }

  void put(const ParamShape& p, const Piece& wanted, std::int64_t begin, std::int64_t end) {
    fill_ += (end - begin) * p.cols;
    wanted_ = wanted_ || meeting(p, wanted, begin, end - begin, 1) > 0;
  }

  /// How many windows of `size` rows from `first` on, the same rows of every rank's shard, hold wanted rows. Of a shard
  /// of P rows the wanted ones are all when there are P or more, else [a, min(P, a + n)) and what runs over into the
  /// next shard, [0, a + n - P), with a = row_begin mod P.
  std::int64_t meeting(const ParamShape& p, const Piece& wanted, std::int64_t first, std::int64_t size,
                       std::int64_t count) const {
    const std::int64_t rows = p.rows, n = wanted.row_end - wanted.row_begin;
    if (n <= 0) return 0;
    if (n >= rows) return count;
    const std::int64_t a = wanted.row_begin % rows;
    const Range one = windows_meeting(first, size, count, a, std::min(rows, a + n));
    const Range two = windows_meeting(first, size, count, 0, a + n - rows);
    const std::int64_t both = std::max<std::int64_t>(0, std::min(one.end, two.end) - std::max(one.begin, two.begin));
    return one.size() + two.size() - both;
  }

  void close() {
    out_.count += 1;
    out_.largest_elements = std::max(out_.largest_elements, fill_);
    out_.wanted += wanted_ ? 1 : 0;
    fill_ = 0;
    wanted_ = false;
  }

  std::int64_t capacity_;
  std::int64_t fill_ = 0;  // of the open bucket
  bool wanted_ = false;
  SyncBuckets out_;
};

}  // namespace

ShardedShapes::ShardedShapes(const PlanShapes& s, std::int64_t ranks) : shapes(s), world(ranks) {
  const auto shard = [&](const UnitShape& unit, Unit& out) {
    for (std::size_t i = 0; i < unit.count; ++i) {
      out.rows[i] = ceil_div(unit.params[i].rows, world);
      out.elements += out.rows[i] * unit.params[i].cols;
    }
  };
  shard(shapes.root, root);
  shard(shapes.layer, layer);
}

std::int64_t EngineSlices::elements(std::int64_t layers) const {
  std::int64_t n = 0;
  for (std::int64_t e : root_buffers) n += e;
  for (std::int64_t e : layer_buffers) n += layers * e;
  return n;
}

std::int64_t EngineSlices::section_bytes(std::int64_t layers, DType dtype) const {
  std::int64_t n = 0;
  for (std::int64_t e : root_buffers) n += aligned_bytes(e * size_of(dtype));
  for (std::int64_t e : layer_buffers) n += layers * aligned_bytes(e * size_of(dtype));
  return n;
}

PlanShapes::PlanShapes(const ModelSpec& model) : layers(model.layers) {
  ModelSpec thin = model;
  thin.layers = 1;
  const std::vector<ShardedUnit> units = fsdp_units(thin, 1, 0);
  HB_CHECK(units.size() == 2, "{} units with one layer", units.size());
  root = shape_of(units[0]);
  layer = shape_of(units[1]);
  Places places;
  for (std::size_t u : {0, 1})
    for (std::size_t i = 0; i < units[u].params.size(); ++i) places[units[u].params[i].parameter] = {u == 1, i};
  for (std::int64_t tp = 1; tp <= model.heads; ++tp)
    if (model.heads % tp == 0 && why_not_rollout_tp(model, tp).empty()) engines.push_back(slices_of(thin, tp, places));
}

const EngineSlices* PlanShapes::engine(std::int64_t tp) const {
  for (const EngineSlices& e : engines)
    if (e.tp == tp) return &e;
  return nullptr;
}

SyncBuckets fill_sync_buckets(const ShardedShapes& sharded, std::int64_t bucket_bytes, DType dtype,
                              const RankSlice& slice) {
  const PlanShapes& shapes = sharded.shapes;
  Filling filling(std::max<std::int64_t>(1, bucket_bytes / size_of(dtype) / sharded.world));
  filling.add(shapes.root, sharded.root, slice.root);
  for (std::int64_t left = shapes.layers; left > 0;) {
    left -= filling.add_whole(sharded.layer, left);
    if (left > 0) filling.add(shapes.layer, sharded.layer, slice.layer), --left;
  }
  return filling.finish();
}

std::map<std::int64_t, std::int64_t> sync_uploads(const ShardedShapes& sharded, std::int64_t bucket_bytes,
                                                  DType dtype) {
  const std::int64_t capacity = std::max<std::int64_t>(1, bucket_bytes / size_of(dtype) / sharded.world);
  std::map<std::int64_t, std::int64_t> out;
  std::int64_t fill = 0, run = 0;  // of the open bucket, and in it of the unit
  const auto end_run = [&] {
    if (run > 0) ++out[run];
    run = 0;
  };
  const auto add = [&](const UnitShape& unit, const ShardedShapes::Unit& shard) {
    for (std::size_t i = 0; i < unit.count; ++i)
      for (std::int64_t row = 0, cols = unit.params[i].cols; row < shard.rows[i];) {
        std::int64_t rows = std::min(shard.rows[i] - row, (capacity - fill) / cols);
        if (rows <= 0 && fill > 0) {
          end_run(), fill = 0;
          continue;
        }
        rows = std::max<std::int64_t>(rows, 1);
        fill += rows * cols, run += rows * cols, row += rows;
      }
    end_run();
  };
  add(sharded.shapes.root, sharded.root);
  for (std::int64_t l = 0; l < sharded.shapes.layers; ++l) add(sharded.shapes.layer, sharded.layer);
  return out;
}

}  // namespace hotbunk
