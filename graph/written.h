// Which bytes hold something: those that an op wrote since their buffer was allocated.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "graph/bound.h"
#include "graph/boxes.h"
#include "graph/byte_ranges.h"

namespace hotbunk {

class WrittenBytes {
 public:
  /// Kinds whose moves say what they read or write.
  static bool reads_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::hash_boxes; }
  static bool writes_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::peer_copy; }

  /// What lies in a fresh buffer is nobody's.
  void alloc(const BoundBuffer&);
  /// The inputs of which the op, on a rank with these places, reads bytes that nobody wrote.
  std::vector<const Tensor*> unwritten(const BoundOp&, const Places&) const;
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

  std::array<ByteRanges, max_sections> written_;
};

}  // namespace hotbunk
