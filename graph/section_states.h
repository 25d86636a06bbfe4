// Which sections of one rank are awake. Every walk over a program (execution, verifier, static memory) asks it before a
// block that puts a section to sleep or wakes it, so that twice is harmless everywhere alike.
#pragma once
#include <array>
#include <cstdint>
#include <unordered_map>

#include "graph/plan.h"

namespace hotbunk {

/// A section is awake while it holds a live buffer; before the first op all are asleep.
class SectionStates {
 public:
  explicit SectionStates(const Program&);

  /// True: the section is already where this block would bring it, and none of the block's ops are to run.
  bool skips(const Block&) const;
  /// The block ran to its end.
  void ran(const Block&);

 private:
  using Counts = std::array<std::int64_t, max_sections>;  // of live buffers

  std::unordered_map<const Block*, Counts> effects_;  // of the blocks that leave other buffers alive than they found
  Counts live_{};
};

}  // namespace hotbunk
