// Which bytes hold something: those that an op wrote since their buffer was allocated. And which of them a prepack has
// put in an order of its own since.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "graph/bound.h"
#include "graph/boxes.h"
#include "graph/byte_ranges.h"

namespace hotbunk {

/// What lies prepacked in a section.
class PackedMatrices {
 public:
  /// One at bytes [begin, end), or of one that was cut since a part, which is nobody's matrix: 0 rows.
  struct Packed {
    std::int64_t begin, end, rows, cols;
    DType dtype;
    friend bool operator==(const Packed&, const Packed&) = default;
  };

  /// Where nothing of it is packed.
  void add(const Packed&);
  void remove(std::int64_t begin, std::int64_t end);
  bool meets(std::int64_t begin, std::int64_t end) const;
  /// Whether all bytes are packed, as whatever.
  bool holds(std::int64_t begin, std::int64_t end) const;
  bool holds(const Packed&) const;
  /// What has bytes in [begin, end), cut there.
  std::vector<Packed> within(std::int64_t begin, std::int64_t end) const;
  friend bool operator==(const PackedMatrices&, const PackedMatrices&) = default;

 private:
  std::size_t first_behind(std::int64_t at) const;
  std::vector<Packed> all_;  // sorted
};

class WrittenBytes {
 public:
  /// Kinds whose moves say what they read or write.
  static bool reads_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::hash_boxes; }
  static bool writes_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::peer_copy; }

  /// What lies in a fresh buffer is nobody's.
  void alloc(const BoundBuffer&);
  /// The inputs of which the op, on a rank with these places, reads bytes that nobody wrote.
  std::vector<const Tensor*> unwritten(const BoundOp&, const Places&) const;
  /// What of the op's inputs is not in the order in which it reads them, and how it is; of an op that reads written
  /// bytes alone.
  ///   prepack               all in rows: what is packed twice is nobody's order
  ///   linear, prepacked     its matrix as it was prepacked: at these bytes, of as many rows and columns
  ///   copy                  in whatever order
  ///   all else, and of it   rows
  std::vector<std::pair<const Tensor*, std::string_view>> misread(const BoundOp&) const;
  /// Its outputs are written. Moves count one by one where they say what is; every other op is taken to write its
  /// outputs whole, as kv_write does block by block.
  void write(const BoundOp&, const Places&);
  friend bool operator==(const WrittenBytes&, const WrittenBytes&) = default;

 private:
  /// `rows` runs of `row_bytes`, `pitch_bytes` apart.
  struct Runs {
    SectionId section;
    std::int64_t begin, row_bytes, pitch_bytes, rows;
    std::int64_t end() const { return begin + (rows - 1) * pitch_bytes + row_bytes; }
  };
  static Runs all_of(const BoundOp&, const Tensor&);
  static Runs part_of(const BoundOp&, const Tensor&, std::int64_t offset, std::int64_t pitch, const Box&);
  bool holds(const Runs&) const;
  void add(const Runs&);

  /// A copy's output is in its input's order, a prepack's in one of its own, all else in rows.
  void order(const BoundOp&, const Places&);

  std::array<ByteRanges, max_sections> written_;
  std::array<PackedMatrices, max_sections> packed_;
};

}  // namespace hotbunk
