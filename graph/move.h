// What an op copies, or hashes, of logical tensors: which rectangle lies where, on either side. What differs from rank
// to rank is not written down for each of them but follows from the rank's place in its groups (boxes.h), so that ranks
// which do the same work share one program.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "layout/shard.h"

namespace hotbunk {

using Rank = std::int32_t;
using GroupId = std::int32_t;  // index into Plan::groups, a family of groups; a rank is in one group of each family

/// A rank's place among the members of its group, by family; -1 where it takes no part.
using Places = std::vector<std::int32_t>;

enum class Holds : std::uint8_t {
  whole,  // the piece, on every rank
  mine,   // the part at this rank's place in its group
  every,  // all parts, one after another in one tensor, as an all-gather leaves them
  peers,  // all parts, each in the memory of the member at that place
};
inline constexpr int num_holds = 4;
std::string_view name_of(Holds);

/// What is cut into parts may itself be one of `count` equal pieces of the tensor: the matrix of a tensor-parallel
/// rank, of which FSDP shards the rows. Piece w lies `w * rows` rows below and `w * cols` columns to the right of piece
/// 0. On this rank it is the one at its place in the family. Where members of the parts' family hold all of them
/// (every, peers), that group has a member for each part and place, places fastest.
struct Within {
  GroupId family = -1;  // -1: the tensor itself is cut into parts
  std::int32_t count = 1;
  std::int32_t repeat = 1;          // so many neighbours hold the same piece; the first of them counts
  std::int64_t rows = 0, cols = 0;  // from a piece to the next one
  std::int64_t last_row = 0;        // the tensor's rows
  friend bool operator==(const Within&, const Within&) = default;
};

/// Parts that are runs of the piece's elements, row by row, in place of rectangles: a matrix that lies somewhere in a
/// flat parameter which is cut into equal parts, whatever parameters begin and end in one (FSDP1). Part h has elements
/// [begin + h * step, begin + h * step + elements), as far as the piece has them: `begin` may lie in front of it. Of
/// pieces within the tensor, each of them.
struct Run {
  std::int64_t begin = 0, elements = 0, step = 0;  // no elements: rectangles
  friend bool operator==(const Run&, const Run&) = default;
};

/// How a tensor is cut over the places of a group: part h lies `h * rows` rows below and `h * cols` columns to the
/// right of part 0, and ends where the tensor does.
struct Parts {
  Holds who = Holds::whole;
  GroupId family = -1;
  std::int32_t count = 1;
  std::int32_t repeat = 1;          // so many neighbours hold the same part
  std::int64_t rows = 0, cols = 0;  // from a part to the next one, in the tensor
  std::int64_t pitch = 0;           // every: from a part to the next one, in elements of memory
  std::int64_t last_row = 0;        // the tensor's rows: what lies beyond is padding and stays where it is
  Within within;                    // then last_row is that of piece 0
  Run run{};                        // then the piece's offset (and pitch of every) is where a part's first element lies
  friend bool operator==(const Parts&, const Parts&) = default;
};

/// One side of a move. `piece`: part 0's rectangle of the logical tensor, and where it lies in the op's tensor; on the
/// side that is no tensor of the plan (a file, or what a hash is over), in the logical tensor itself.
struct Side {
  std::int32_t tensor = 0;  // which of the op's inputs (from) or outputs (to)
  Piece piece;
  Parts parts;
  friend bool operator==(const Side&, const Side&) = default;
};

/// What the two sides have in common goes from one to the other, and is cast where their dtypes differ.
struct Move {
  Side from, to;
  friend bool operator==(const Move&, const Move&) = default;
};

}  // namespace hotbunk
