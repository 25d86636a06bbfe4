// Shard arithmetic: which part of a dimension a rank holds.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/rounding.h"

namespace hotbunk {

struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// Rows of part `index` when `extent` rows are cut into `parts` as torch.chunk and FSDP2's Shard(0) do: every part
/// holds ceil(extent / parts) rows, the last ones fewer, possibly none. For collectives each part is padded to that
/// size.
constexpr Range chunk_range(std::int64_t extent, std::int64_t parts, std::int64_t index) {
  const std::int64_t size = ceil_div(extent, parts);
  return {std::min(extent, index * size), std::min(extent, (index + 1) * size)};
}

/// Equal parts; the caller has checked that parts divides extent (validation, E2xx).
constexpr Range even_range(std::int64_t extent, std::int64_t parts, std::int64_t index) {
  return {extent / parts * index, extent / parts * (index + 1)};
}

/// Where the next tensor-parallel rank's piece of a parameter lies: so many rows further down and columns further
/// right.
struct TensorStep {
  std::int64_t rows = 0, cols = 0;  // both 0: every rank has all of it
  std::int64_t repeat = 1;          // so many neighbours hold the same piece
  friend bool operator==(const TensorStep&, const TensorStep&) = default;
};

/// A rectangle of a logical (rows, cols) tensor and where it lies in one rank's buffer. 1-D tensors have cols = 1.
/// Element (r, c) of the rectangle is at offset + (r - row_begin) * pitch + (c - col_begin), in elements.
struct Piece {
  std::int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
  std::int64_t offset = 0, pitch = 0;
  std::int64_t elements() const { return (row_end - row_begin) * (col_end - col_begin); }
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// Elements of a matrix of so many columns, row by row, as rectangles: the end of a row, whole rows and the beginning
/// of another, or some of these. Calls f(rows, cols, the first element's number).
template <class F>
void each_rectangle(const Range& elements, std::int64_t cols, F&& f) {
  for (std::int64_t at = elements.begin; at < elements.end;) {
    const std::int64_t row = at / cols, col = at % cols, left = elements.end - at;
    const std::int64_t rows = col == 0 && left >= cols ? left / cols : 1, width = std::min(cols - col, left);
    f(Range{row, row + rows}, Range{col, col + width}, at);
    at += rows * width;
  }
}

}  // namespace hotbunk
