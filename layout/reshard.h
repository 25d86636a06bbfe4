// Who sends which rectangle to whom when tensors move from one layout to another, shard to shard: no rank ever
// receives what it holds, nor anything twice, nor anything it does not need.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layout/placement.h"

namespace hotbunk {

/// What each rank holds or needs of one tensor: rectangles, which may overlap (replication, GQA).
using RankBoxes = std::vector<std::vector<Rectangle>>;

struct TensorMove {
  std::string name;
  RankBoxes have, need;  // one list per rank, equally many
};

struct Transfer {
  std::int64_t source = 0, destination = 0;
  Rectangle box;
  friend bool operator==(const Transfer&, const Transfer&) = default;
};

struct TensorTransfers {
  std::string name;
  std::vector<Transfer> transfers;  // by rows, then columns of the tensor
};

struct Reshard {
  std::vector<TensorTransfers> tensors;
  std::vector<std::int64_t> sent, received;  // elements per rank, all tensors together
};

/// The transfers of all tensors. Volume is minimal: received(r) = |need(r) \ have(r)|, in elements.
/// Where several ranks hold a range, the source is one on the destination's node if there is one (`ranks_per_node`
/// consecutive ranks; 0 = all on one), of these the one that has sent least so far, of these the lowest: deterministic.
/// Throws InternalError when something needed is held by nobody.
/// Source: derived; tests/layout/reshard_test.cc checks it element by element.
Reshard reshard(std::span<const TensorMove>, std::int64_t ranks_per_node = 0);

/// The part `box` of `piece`, in the same buffer; `box` lies inside it.
Piece cut(const Piece& piece, const Rectangle& box);

}  // namespace hotbunk
