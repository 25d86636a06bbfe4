#include "graph/section_states.h"

#include "graph/bound.h"

namespace hotbunk {

SectionStates::SectionStates(const Program& program) {
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks) {
      Counts effect{};
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind != OpKind::alloc && op->kind != OpKind::free) return;
        if (const BoundBuffer b = op.allocated(); !b.is_local())
          effect[static_cast<std::size_t>(b.section())] += op->kind == OpKind::alloc ? 1 : -1;
      });
      if (effect != Counts{}) effects_.emplace(&block, effect);
    }
}

bool SectionStates::skips(const Block& block) const {
  if (block.enters == Enters::nothing) return false;
  const bool awake = live_[static_cast<std::size_t>(block.section)] > 0;
  return awake == (block.enters == Enters::awake);
}

void SectionStates::ran(const Block& block) {
  const auto found = effects_.find(&block);
  if (found == effects_.end()) return;
  for (std::size_t s = 0; s < live_.size(); ++s) live_[s] += found->second[s];
}

}  // namespace hotbunk
