// Placement: what each axis of a mesh does to a tensor, and the rectangle that a rank is left with.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/mesh.h"
#include "layout/shard.h"
#include "spec/model.h"

namespace hotbunk {

struct Placement {
  enum class Kind : std::uint8_t {
    replicate,     // every rank the whole
    partial,       // every rank a summand of the whole
    shard,         // parts of ceil(extent / n) rounded up to `block`: the last ranks hold fewer, possibly nothing
    shard_blocks,  // blocks are indivisible (heads); fewer blocks than ranks: each is held by n / blocks ranks
  };
  Kind kind = Kind::replicate;
  int dim = 0;  // tensor dimension: 0 rows, 1 columns
  std::int64_t block = 1;

  static Placement replicate() { return {}; }
  static Placement partial() { return {Kind::partial, 0, 1}; }
  static Placement shard(int dim, std::int64_t block = 1) { return {Kind::shard, dim, block}; }
  static Placement shard_blocks(int dim, std::int64_t block) { return {Kind::shard_blocks, dim, block}; }
  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Axes in the order in which they cut: each cuts what the one before left. Axes that are not named replicate.
struct AxisPlacement {
  std::string axis;
  Placement placement;
};
using TensorPlacement = std::vector<AxisPlacement>;

/// A rectangle of a logical (rows, cols) tensor; 1-D tensors have cols = 1.
struct Rectangle {
  Range rows, cols;
  std::int64_t elements() const { return rows.size() * cols.size(); }
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

inline Rectangle box_of(const Piece& piece) {
  return {{piece.row_begin, piece.row_end}, {piece.col_begin, piece.col_end}};
}
/// (rows, cols) of a parameter of one or two dimensions.
Rectangle whole(const ParamSpec&);

/// What part `index` of `parts` holds of `range`. shard_blocks throws InternalError where the blocks neither divide
/// over the parts nor the parts over the blocks.
Range part_of(Range range, const Placement&, std::int64_t parts, std::int64_t index);

/// What `rank` holds; an empty box where nothing is left for it.
Rectangle place(Rectangle whole, const TensorPlacement&, const Mesh&, std::int64_t rank);

/// A norm's weight or a bias: one dimension.
bool is_vector(ParamRole);

/// Which dimension of a parameter tensor parallelism cuts, by its role: 0 rows, 1 columns, none: replicated.
std::optional<int> tensor_parallel_dim(ParamRole);

/// Megatron's and the rollout's tensor parallelism of one parameter by its role: axis "tp", or "etp" for experts.
///   column-parallel (q, k, v by heads; gate, up; MLA's b-projections by heads), row-parallel (o, down),
///   vocabulary-parallel (embedding, head; parts rounded up to `vocab_multiple` rows, Megatron's
///   make-vocab-size-divisible-by), all else replicated.
TensorPlacement tensor_parallel(const ParamSpec&, const ModelSpec&, std::int64_t vocab_multiple = 1);

}  // namespace hotbunk
