// Mesh: named dimensions over ranks. `axis` is a mesh dimension, `dim` a tensor dimension.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

struct MeshAxis {
  std::string name;  // "tp", "cp", "ep", "dp", "pp", "fsdp", …
  std::int64_t size = 1;
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

/// Ranks 0 … size-1 as a box of named axes, the first axis varying fastest: with axes (tp 4, dp 4, pp 4),
/// rank = tp + 4 dp + 16 pp. Accessors throw InternalError for an unknown axis or a rank outside the mesh.
class Mesh {
 public:
  explicit Mesh(std::vector<MeshAxis> fastest_first);
  /// The same box over ranks in another order: its i-th place, counted the same way, is rank `ranks[i]`. A permutation
  /// of 0 ... size-1, else InternalError.
  Mesh(std::vector<MeshAxis> fastest_first, std::vector<std::int64_t> ranks);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  std::int64_t size() const { return size_; }
  bool has(std::string_view axis) const;
  std::int64_t extent(std::string_view axis) const;
  std::int64_t coordinate(std::int64_t rank, std::string_view axis) const;

  /// The ranks that differ from `rank` only along `axes` (flattened; one axis is the usual case), ascending.
  std::vector<std::int64_t> group_of(std::int64_t rank, const std::vector<std::string>& axes) const;
  /// All groups along `axes`: every rank is in exactly one. Ordered by their smallest rank.
  std::vector<std::vector<std::int64_t>> groups(const std::vector<std::string>& axes) const;

 private:
  std::size_t index(std::string_view axis) const;
  std::int64_t place_of(std::int64_t rank) const;
  std::int64_t rank_at(std::int64_t place) const;

  std::vector<MeshAxis> axes_;
  std::vector<std::int64_t> strides_;
  std::vector<std::int64_t> ranks_, places_;  // by place, by rank; none: each rank is at its own place
  std::int64_t size_ = 1;
};

/// Megatron's default rank order, fastest first.
inline constexpr std::string_view megatron_order = "tp-cp-ep-dp-pp";

/// A mesh from an order ("tp-cp-ep-dp-pp", fastest first) and sizes; axes of the order without a size have size 1.
/// Errors: E240 an axis twice in the order, or a size below 1; E241 an axis with a size above 1 missing in the order.
Result<Mesh> mesh_from_order(std::string_view order, const std::map<std::string, std::int64_t>& sizes);

/// Whether dense and expert parts can live on these two meshes over the same ranks: equal size, and every rank in the
/// same pipeline stage on both. Errors: E242 sizes differ; E243 pipeline stages differ.
Status check_expert_mesh(const Mesh& dense, const Mesh& expert);

}  // namespace hotbunk
