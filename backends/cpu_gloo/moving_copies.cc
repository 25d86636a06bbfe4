#include "backends/cpu_gloo/moving_copies.h"

#include <algorithm>

namespace hotbunk {
namespace {

bool reads(const Op& op, BufferId buffer) {
  return std::ranges::any_of(op.inputs, [&](const Tensor& t) { return t.buffer == buffer; });
}

}  // namespace

MovingCopies::MovingCopies(const Program& program) : program_(program) {
  for (const Body& body : program.bodies)
    for (auto op = body.ops.begin(); op != body.ops.end(); ++op) {
      if (op->kind != OpKind::copy) continue;
      const BufferId source = op->inputs[0].buffer;
      const auto next = std::find_if(op + 1, body.ops.end(), [&](const Op& later) {
        return reads(later, source) || (later.kind == OpKind::free && later.buffer == source);
      });
      if (next != body.ops.end() && next->kind == OpKind::free) source_dies_.insert(&*op);
    }
}

bool MovingCopies::contains(const BoundOp& op) const {
  return op.block->enters != Enters::nothing && source_dies_.contains(op.op) &&
         op.buffer(op->inputs[0]).space() != op.buffer(op->outputs[0]).space();
}

std::set<SectionId> MovingCopies::sections(Space space) const {
  std::set<SectionId> out;
  for (const auto& blocks : program_.phases)
    for (const Block& block : blocks)
      each_op(program_, block, [&](const BoundOp& op) {
        if (!contains(op)) return;
        for (const BoundBuffer& b : {op.buffer(op->inputs[0]), op.buffer(op->outputs[0])})
          if (b.space() == space) out.insert(b.section());
      });
  return out;
}

}  // namespace hotbunk
