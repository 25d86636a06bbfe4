// An op as a call runs it: its slots bound to memory, its name in full. Whoever walks a program walks these.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "graph/plan.h"

namespace hotbunk {

/// A buffer of the program, or a local of a call.
struct BoundBuffer {
  const Program* program = nullptr;
  const Buffer* buffer = nullptr;
  std::int64_t offset = 0;  // bytes from the base of its section
  std::string_view prefix;  // of a local: the call's name
  BufferId id = -1;         // of the program; -1: a local

  bool is_local() const { return id < 0; }
  SectionId section() const { return buffer->section; }
  const std::string& section_name() const { return program->section(section()).name; }
  Space space() const { return program->section(section()).space; }
  Category category() const { return buffer->category; }
  std::int64_t bytes() const { return buffer->bytes(); }
  std::string name() const { return std::string(prefix) += buffer->name; }
};

/// Pointers into a plan, which outlives them; copied freely.
struct BoundOp {
  const Program* program = nullptr;
  const Block* block = nullptr;
  const Call* call = nullptr;
  const Op* op = nullptr;

  const Op& operator*() const { return *op; }
  const Op* operator->() const { return op; }
  const Body& body() const { return program->bodies[static_cast<std::size_t>(call->body)]; }
  /// Of a map or unmap.
  const Section& section() const { return program->section(op->section); }
  /// In full: what a feed or fetch of a parameter is known by, and what a trace calls it.
  std::string name() const { return call->name + op->name; }

  /// What ops of one call that run as one are called in a trace: "train.layers.3.forward", the call and what its body
  /// is.
  std::string name_with_neighbours() const {
    const std::string& name = body().name;
    if (call->name.empty()) return name;
    const std::string_view written = std::string_view(name).substr(0, name.find('/'));  // "/2": another of that name
    return call->name + std::string(written.substr(written.rfind('.') + 1));
  }

  /// What a slot is bound to, as a whole.
  BoundBuffer buffer(BufferId slot) const {
    const Body& b = body();
    if (slot < b.num_ports) {
      const BufferId id = call->ports[static_cast<std::size_t>(slot)].buffer;
      const Buffer& bound = program->buffers[static_cast<std::size_t>(id)];
      return {program, &bound, bound.offset, {}, id};
    }
    const auto local = static_cast<std::size_t>(slot - b.num_ports);
    return {program, &b.locals[local], call->locals[local], call->name, -1};
  }
  BoundBuffer buffer(const Tensor& t) const { return buffer(t.buffer); }
  /// Of an alloc or free.
  BoundBuffer allocated() const { return buffer(op->buffer); }
  /// Where a tensor begins, in bytes from its buffer's start.
  std::int64_t offset_in_buffer(const Tensor& t) const {
    const bool port = t.buffer < body().num_ports;
    return t.offset_bytes + (port ? call->ports[static_cast<std::size_t>(t.buffer)].offset_bytes : 0);
  }
  /// The same, from the base of its section.
  std::int64_t begin_of(const Tensor& t) const { return buffer(t).offset + offset_in_buffer(t); }
};

/// Calls on_op(BoundOp) for the ops of a call and on_mark(const Mark&) for its events, in their one order.
template <class OnOp, class OnMark>
void each_step(const Program& program, const Block& block, const Call& call, OnOp&& on_op, OnMark&& on_mark) {
  const std::vector<Op>& ops = program.bodies[static_cast<std::size_t>(call.body)].ops;
  auto mark = call.marks.begin();
  for (std::size_t i = 0; i <= ops.size(); ++i) {
    for (; mark != call.marks.end() && mark->before <= static_cast<std::int32_t>(i); ++mark) on_mark(*mark);
    if (i < ops.size()) on_op(BoundOp{&program, &block, &call, &ops[i]});
  }
}

/// The same for all calls of a block.
template <class OnOp, class OnMark>
void each_step(const Program& program, const Block& block, OnOp&& on_op, OnMark&& on_mark) {
  for (const Call& call : block.calls) each_step(program, block, call, on_op, on_mark);
}

/// Only the ops.
template <class OnOp>
void each_op(const Program& program, const Block& block, OnOp&& on_op) {
  each_step(program, block, on_op, [](const Mark&) {});
}

}  // namespace hotbunk
