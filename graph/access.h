// Which bytes of which section an op touches: what dependencies, verification and liveness are made of.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

struct Access {
  Section section = Section::transient;
  std::int64_t begin = 0, end = 0;  // bytes from the section's base
  bool write = false;
  BufferId buffer = -1;  // -1: map, unmap
};

/// Calls visit(access) for all accesses of one op, reads first. In-place outputs (rope, all_reduce, adamw, accumulate)
/// appear as writes; a write orders after reads and writes alike, so a read of the same bytes need not be listed again.
template <class F>
void each_access(const Program& program, const Op& op, F&& visit) {
  if (op.kind == OpKind::map || op.kind == OpKind::unmap)
    return visit(Access{op.section, op.map_begin, op.map_end, true});
  const auto side = [&](const std::vector<Tensor>& tensors, bool write) {
    for (const Tensor& t : tensors) {
      const Buffer& b = program.buffers[static_cast<std::size_t>(t.buffer)];
      const std::int64_t begin = b.offset + t.offset_bytes;
      visit(Access{b.section, begin, begin + t.capacity_bytes(), write, t.buffer});
    }
  };
  side(op.inputs, false);
  side(op.outputs, true);
}

struct BlockVisit {
  std::int16_t phase = 0;
  std::int32_t block = 0;
};
inline const Block& block_at(const Program& p, const BlockVisit& v) {
  return p.phases[static_cast<std::size_t>(v.phase)][static_cast<std::size_t>(v.block)];
}
/// What a static walk walks to have seen everything: the prologue, iterations until they repeat, the epilogue. Where
/// phases do not run each time, one with them, one without, and one with them again.
struct WalkTurn {
  When when = When::iteration;
  bool with_periodic = true;  // also the phases that do not run in every iteration
};
std::vector<WalkTurn> walk_turns(const Plan&);
/// The blocks of a turn in order: every block of a driven phase, those that leave no buffer behind twice, so that the
/// steady state of a loop is seen.
std::vector<BlockVisit> block_visits(const Plan&, const Program&, const WalkTurn&);

}  // namespace hotbunk
