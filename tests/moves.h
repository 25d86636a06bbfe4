// Moves that come to given boxes, on every rank.
#pragma once
#include <vector>

#include "graph/boxes.h"

namespace hotbunk::test {

/// A box of a peer comes from the part at its place in family 0.
inline Move move_of(const Box& b) {
  Move m;
  m.from = {b.input, {0, b.rows, 0, b.cols, b.src_offset, b.src_pitch}, {}};
  m.to = {b.output, {0, b.rows, 0, b.cols, b.dst_offset, b.dst_pitch}, {}};
  if (b.peer < 0) return m;
  m.from.parts = {.who = Holds::peers,
                  .family = 0,
                  .count = b.peer + 1,
                  .rows = b.rows,
                  .last_row = (b.peer + 1) * b.rows,
                  .within = {}};
  m.to.piece.row_begin = b.peer * b.rows, m.to.piece.row_end = (b.peer + 1) * b.rows;
  return m;
}

inline std::vector<Move> moves_of(const std::vector<Box>& boxes) {
  std::vector<Move> out;
  for (const Box& b : boxes) out.push_back(move_of(b));
  return out;
}

}  // namespace hotbunk::test
