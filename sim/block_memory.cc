#include "sim/block_memory.h"

#include <map>

namespace hotbunk {

BlockMemory::BlockMemory(const Program& program, const Block& block) {
  std::map<BufferId, std::int64_t> live;  // +1: became live, -1: was freed
  for (const Call& call : block.calls) {
    LiveProfile& profile = calls.emplace_back();
    each_step(
        program, block, call,
        [&](const BoundOp& op) {
          maps |= op->kind == OpKind::map || op->kind == OpKind::unmap;
          if (op->kind != OpKind::alloc && op->kind != OpKind::free) return;
          const BoundBuffer buffer = op.allocated();
          const std::int64_t sign = op->kind == OpKind::alloc ? 1 : -1;
          profile.add(buffer.space(), buffer.category(), sign * buffer.bytes());
          whole.add(buffer.space(), buffer.category(), sign * buffer.bytes());
          if (!buffer.is_local()) live[buffer.id] += sign;
        },
        [](const Mark&) {});
  }
  for (const auto& [buffer, change] : live) {
    if (change > 0) becomes_live.push_back(buffer);
    if (change < 0) becomes_free.push_back(buffer);
  }
}

}  // namespace hotbunk
