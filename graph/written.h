// Which bytes hold something: those that an op wrote since their buffer was allocated.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "graph/boxes.h"
#include "graph/byte_ranges.h"

namespace hotbunk {

class WrittenBytes {
 public:
  /// The program outlives it.
  explicit WrittenBytes(const Program& program) : program_(&program) {}

  /// Kinds whose moves say what they read or write.
  static bool reads_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::hash_boxes; }
  static bool writes_boxes(OpKind k) { return k == OpKind::copy_boxes || k == OpKind::peer_copy; }

  /// What lies in a fresh buffer is nobody's.
  void alloc(const Buffer&);
  /// The inputs of which the op, on a rank with these places, reads bytes that nobody wrote.
  std::vector<const Tensor*> unwritten(const Op&, const Places&) const;
  /// Its outputs are written. Moves count one by one where they say what is; every other op is taken to write its
  /// outputs whole, as kv_write does block by block.
  void write(const Op&, const Places&);
  friend bool operator==(const WrittenBytes&, const WrittenBytes&) = default;

 private:
  /// `rows` runs of `row_bytes`, `pitch_bytes` apart.
  struct Runs {
    Section section;
    std::int64_t begin, row_bytes, pitch_bytes, rows;
    std::int64_t end() const { return begin + (rows - 1) * pitch_bytes + row_bytes; }
  };
  Runs all_of(const Tensor&) const;
  Runs part_of(const Tensor&, std::int64_t offset, std::int64_t pitch, const Box&) const;
  bool holds(const Runs&) const;
  void add(const Runs&);

  const Program* program_;
  std::array<ByteRanges, num_sections> written_;
};

}  // namespace hotbunk
