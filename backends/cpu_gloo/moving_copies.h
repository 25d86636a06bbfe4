// Copies whose bytes need not be copied: their source is dead behind them.
#pragma once
#include <set>
#include <unordered_set>

#include "graph/bound.h"
#include "graph/plan.h"

namespace hotbunk {

/// Of a program that outlives it: the copies between the spaces with which a section goes to sleep or wakes
/// (Block::enters), of buffers that the same call frees behind them with nobody reading them in between.
class MovingCopies {
 public:
  explicit MovingCopies(const Program&);

  bool contains(const BoundOp&) const;
  /// Sections of the device that they read and write, and of the host.
  std::set<SectionId> device_sections() const { return sections(Space::device); }
  std::set<SectionId> host_sections() const { return sections(Space::host); }

 private:
  std::set<SectionId> sections(Space) const;

  const Program& program_;
  std::unordered_set<const Op*> source_dies_;  // of all bodies' copies
};

}  // namespace hotbunk
