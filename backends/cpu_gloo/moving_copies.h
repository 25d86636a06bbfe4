// Copies whose bytes need not be copied: their source is dead behind them.
#pragma once
#include <unordered_set>
#include <vector>

#include "graph/bound.h"
#include "graph/plan.h"

namespace hotbunk {

/// Of a program that outlives it: the copies between the spaces with which a section goes to sleep or wakes
/// (Block::enters), of buffers that the same call frees behind them with nobody reading them in between.
class MovingCopies {
 public:
  explicit MovingCopies(const Program&);

  bool contains(const BoundOp&) const;
  /// Host sections that they write, ascending.
  std::vector<SectionId> host_sections() const;

 private:
  const Program& program_;
  std::unordered_set<const Op*> source_dies_;  // of all bodies' copies
};

}  // namespace hotbunk
