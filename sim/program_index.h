// A program as dense arrays: what the engine needs of an op in its hot loop, by a number.
#pragma once
#include <cstdint>
#include <vector>

#include "graph/bound.h"

namespace hotbunk {

/// What an op occupies while it runs.
enum class Occupies : std::uint8_t {
  stream,    // nothing but its stream
  host,      // the rank's host thread, where streams are threads; else nothing but its stream
  device,    // the device's compute, shared by all ranks and streams on it
  link_h2d,  // the device's link, one direction
  link_d2h,
  meeting,   // all members of its group, together
  transfer,  // who sends and who receives, together
};

/// Which actual sizes an op's cost, bytes and FLOPs can depend on.
enum class DependsOn : std::uint8_t { nothing, shapes, pairs };

struct OpInfo {
  BoundOp op;
  Occupies occupies = Occupies::stream;
  DependsOn depends_on = DependsOn::nothing;
  std::int32_t block = 0;  // within its phase
};

class ProgramIndex {
 public:
  ProgramIndex(const Plan&, const Program&);
  const Program& program() const { return *program_; }
  const OpInfo& operator[](std::uint32_t op) const { return ops_[op]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(ops_.size()); }
  /// The number of the first op of a call of this phase, and its block's within the phase.
  struct Place {
    std::uint32_t op;
    std::int32_t block;
  };
  Place find_call(const BoundOp&, std::int16_t phase) const;

 private:
  const Program* program_;
  std::vector<OpInfo> ops_;
  std::vector<std::vector<std::vector<std::uint32_t>>> first_;  // [phase][block][call]
};

}  // namespace hotbunk
