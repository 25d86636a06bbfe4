// Which bytes of which section an op touches: what dependencies, verification and liveness are made of.
#pragma once
#include <limits>
#include <vector>

#include "graph/bound.h"

namespace hotbunk {

struct Access {
  SectionId section = transient_section;
  std::int64_t begin = 0, end = 0;  // bytes from the section's base
  bool write = false;
  BufferId buffer = -1;  // -1: map, unmap
};

/// Calls visit(access) for all accesses of one op, reads first. In-place outputs (rope, all_reduce, adamw, accumulate)
/// appear as writes; a write orders after reads and writes alike, so a read of the same bytes need not be listed again.
/// `access_of(tensor)`: where the tensor lies.
template <class AccessOf, class F>
void each_access_of(const Op& op, AccessOf&& access_of, F&& visit) {
  if (op.kind == OpKind::map || op.kind == OpKind::unmap)
    return visit(Access{op.section, op.map_begin, op.map_end, true});
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side) {
      Access a = access_of(t);
      a.write = side == &op.outputs;
      visit(a);
    }
}

/// Of an op that names buffers.
template <class F>
void each_access(const std::vector<Buffer>& buffers, const Op& op, F&& visit) {
  const auto access_of = [&](const Tensor& t) {
    const Buffer& b = buffers[static_cast<std::size_t>(t.buffer)];
    const std::int64_t begin = b.offset + t.offset_bytes;
    return Access{b.section, begin, begin + t.capacity_bytes(), false, t.buffer};
  };
  each_access_of(op, access_of, visit);
}

/// Of an op of a call, whose locals get the numbers from `first_local` on.
template <class F>
void each_access(const BoundOp& op, BufferId first_local, F&& visit) {
  const auto access_of = [&](const Tensor& t) {
    const BoundBuffer b = op.buffer(t);
    const std::int64_t begin = b.offset + op.offset_in_buffer(t);
    const BufferId id = b.is_local() ? first_local + t.buffer - op.body().num_ports : b.id;
    return Access{b.section(), begin, begin + t.capacity_bytes(), false, id};
  };
  each_access_of(*op, access_of, visit);
}

struct BlockVisit {
  std::int16_t phase = 0;
  std::int32_t block = 0;
};
inline const Block& block_at(const Program& p, const BlockVisit& v) {
  return p.phases[static_cast<std::size_t>(v.phase)][static_cast<std::size_t>(v.block)];
}
/// What a static walk of a program walks to have seen everything: the prologue, iterations until they repeat, the
/// epilogue. Where phases do not run each time, one with them, one without, and one with them again. Phases that the
/// program's role plays some steps back are not there in its first iterations, and alone in those behind the last; runs
/// of fewer iterations come first, each of which leaves all as it was.
struct WalkTurn {
  When when = When::iteration;
  bool with_periodic = true;  // also the phases that do not run in every iteration
  std::int32_t least_back = 0, most_back = std::numeric_limits<std::int32_t>::max();  // Player::steps_back
};
std::vector<WalkTurn> walk_turns(const Plan&, const Program&);
/// The blocks of a turn in order: every block of a driven phase, those that leave no buffer behind twice, so that the
/// steady state of a loop is seen.
std::vector<BlockVisit> block_visits(const Plan&, const Program&, const WalkTurn&);

}  // namespace hotbunk
