// The rectangles that an op's moves come to on one rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// A strided 2-D copy between two tensors, in elements of each side's dtype:
///   dst[dst_offset + i*dst_pitch + j] = cast(src[src_offset + i*src_pitch + j]),  0 <= i < rows, 0 <= j < cols.
/// On a side that is no tensor of the plan (feed, fetch, hash_boxes) offset and pitch are those of the logical tensor.
struct Box {
  std::int64_t src_offset = 0, src_pitch = 0, dst_offset = 0, dst_pitch = 0, rows = 0, cols = 0;
  std::int32_t peer = -1;              // the place in the group of the rank whose tensor is read; -1: this rank's own
  std::int32_t input = 0, output = 0;  // which of the op's inputs and outputs
  std::int64_t elements() const { return rows * cols; }
  friend bool operator==(const Box&, const Box&) = default;
};

/// The place of a rank in each family.
Places places_of(const Plan&, Rank);

/// The same of all ranks, by rank.
std::vector<Places> all_places(const Plan&);

/// What the op moves on the rank with these places, none empty; rows without a gap on both sides are one row.
std::vector<Box> boxes_of(const Op&, const Places&);

/// How many elements a move copies on the rank with these places, and how many of them other ranks hold: the sums over
/// its boxes, without making them.
struct MovedElements {
  std::int64_t all = 0, of_peers = 0;
};
MovedElements moved_elements(const Move&, const Places&);

/// The rectangles that the op's moves write, each of one output: src_offset and src_pitch say nothing. As boxes_of, but
/// parts that adjoin one another are one.
std::vector<Box> written_boxes(const Op&, const Places&);

/// The places of the ranks that differ in which bytes an op of the program writes, or in whether they are whom it
/// broadcasts from: one of each kind. What they read lies inside what the first place of each group reads.
std::vector<Places> writers_of(const Plan&, const Program&);

/// "" or what is wrong with the op's moves: tensors that it has not, families that the plan (of `num_families`) has
/// not, parts outside of their tensor.
std::string check_moves(const Op&, std::size_t num_families);

}  // namespace hotbunk
