// Blocks by hand, as flat lists of ops: a test writes and reads ops that name the program's buffers, with records and
// waits among them, whatever calls they are.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "graph/bound.h"
#include "graph/draft.h"
#include "lowering/places.h"

namespace hotbunk::test {

/// With the streams and sections that lower() writes.
inline Plan empty_plan() {
  Plan plan;
  plan.streams = plan_streams();
  return plan;
}
inline Program empty_program() {
  Program program;
  program.sections = program_sections();
  return program;
}
inline Draft empty_draft() {
  Draft draft;
  draft.sections = program_sections();
  return draft;
}

/// One call of a body of its own, whose ports are all buffers of the program, by number. Buffers that ops name and the
/// program has not yet are ports too: a test may add them later.
inline Block block_of(Program& program, std::string name, const std::vector<Op>& ops) {
  Body body;
  body.name = name + "/" + std::to_string(program.bodies.size());
  body.num_ports = static_cast<std::int32_t>(program.buffers.size());
  for (const Op& op : ops) {
    body.num_ports = std::max(body.num_ports, op.buffer + 1);
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side) body.num_ports = std::max(body.num_ports, t.buffer + 1);
  }
  Call call;
  call.body = static_cast<std::int32_t>(program.bodies.size());
  for (BufferId id = 0; id < body.num_ports; ++id) call.ports.push_back({id, 0});
  for (const Op& op : ops) {
    if (op.kind == OpKind::record || op.kind == OpKind::wait)
      call.marks.push_back({static_cast<std::int32_t>(body.ops.size()), op.kind, op.stream, op.event});
    else body.ops.push_back(op);
  }
  program.bodies.push_back(std::move(body));
  Block block;
  block.name = std::move(name);
  block.calls.push_back(std::move(call));
  return block;
}

/// One op as a call runs it, in a program of its own.
class LoneOp {
 public:
  explicit LoneOp(const Op& op) : block_(block_of(program_, "only", {op})) {}
  LoneOp(const LoneOp&) = delete;
  LoneOp& operator=(const LoneOp&) = delete;
  BoundOp operator*() const { return {&program_, &block_, &block_.calls[0], &program_.bodies[0].ops[0]}; }

 private:
  Program program_;
  Block block_;
};

/// The ops of a block in their order, names in full, each slot the buffer that it is bound to. Locals are numbered
/// behind the program's buffers, call by call.
inline std::vector<Op> ops_of(const Program& program, const Block& block) {
  std::vector<Op> out;
  BufferId first_local = static_cast<BufferId>(program.buffers.size());
  for (const Call& call : block.calls) {
    const Body& body = program.bodies[static_cast<std::size_t>(call.body)];
    const auto id_of = [&](BufferId slot) {
      return slot < body.num_ports ? call.ports[static_cast<std::size_t>(slot)].buffer
                                   : first_local + slot - body.num_ports;
    };
    each_step(
        program, block, call,
        [&](const BoundOp& bound) {
          Op op = *bound;
          op.name = bound.name();
          if (op.buffer >= 0) op.buffer = id_of(op.buffer);
          for (auto* side : {&op.inputs, &op.outputs})
            for (Tensor& t : *side) {
              t.offset_bytes = bound.offset_in_buffer(t);
              t.buffer = id_of(t.buffer);
            }
          out.push_back(std::move(op));
        },
        [&](const Mark& m) {
          Op op;
          op.kind = m.kind, op.stream = m.stream, op.event = m.event;
          out.push_back(std::move(op));
        });
    first_local += static_cast<BufferId>(body.locals.size());
  }
  return out;
}

/// A block's ops to be changed: what was done to them becomes the block's one call when this is destroyed, at the end
/// of the expression.
class EditedOps : public std::vector<Op> {
 public:
  EditedOps(Program& program, Block& block)
      : std::vector<Op>(ops_of(program, block)), program_(program), block_(block) {
    for (const Call& call : block.calls)  // locals become buffers of the program
      for (std::size_t i = 0; i < call.locals.size(); ++i) {
        Buffer local = program.bodies[static_cast<std::size_t>(call.body)].locals[i];
        local.name.insert(0, call.name);
        local.offset = call.locals[i];
        program.buffers.push_back(std::move(local));
      }
  }
  EditedOps(const EditedOps&) = delete;
  EditedOps& operator=(const EditedOps&) = delete;
  ~EditedOps() { block_.calls = std::move(block_of(program_, block_.name, *this).calls); }

  void remove(std::size_t i) { erase(begin() + static_cast<std::ptrdiff_t>(i)); }
  void add(std::size_t i, Op op) { insert(begin() + static_cast<std::ptrdiff_t>(i), std::move(op)); }

 private:
  Program& program_;
  Block& block_;
};

}  // namespace hotbunk::test
