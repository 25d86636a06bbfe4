// Small programs by hand: tensors, ops and a plan of one rank around them.
#pragma once
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "graph/draft.h"
#include "graph/verify.h"
#include "tests/blocks.h"

namespace hotbunk::test {

inline Tensor tensor(BufferId buffer, DType dtype, std::initializer_list<Dim> shape, std::int64_t offset_bytes = 0) {
  Tensor t{.buffer = buffer, .offset_bytes = offset_bytes, .dtype = dtype};
  for (const Dim& d : shape) t.shape[t.rank++] = d;
  return t;
}
inline Dim fixed(std::int64_t n) { return {n, fixed_extent, 0}; }
inline Dim tokens(std::int64_t n, std::int64_t begin = 0) { return {n, tokens_extent, begin}; }
inline Dim seqs(std::int64_t n) { return {n, seqs_extent, 0}; }

inline Op op(OpKind kind, std::vector<Tensor> inputs, std::vector<Tensor> outputs, StreamId stream = streams::compute) {
  Op o;
  o.kind = kind;
  o.stream = stream;
  o.inputs = std::move(inputs);
  o.outputs = std::move(outputs);
  return o;
}
inline Op memory(OpKind kind, BufferId buffer, StreamId stream = streams::compute) {
  Op o = op(kind, {}, {}, stream);
  o.buffer = buffer;
  return o;
}
inline Op event(OpKind kind, StreamId stream, EventId id) {
  Op o = op(kind, {}, {}, stream);
  o.event = id;
  return o;
}
inline Op mapping(OpKind kind, SectionId section, std::int64_t begin, std::int64_t end) {
  Op o = op(kind, {}, {});
  o.section = section;
  o.map_begin = begin;
  o.map_end = end;
  return o;
}

/// What the verifier finds, a line each.
inline std::string faults_of(const Plan& plan) {
  std::string all;
  for (const std::string& line : verify(plan)) all += line + '\n';
  return all;
}

/// fp32 elements in the transient section.
inline Buffer scratch(std::string name, std::int64_t elements, std::int64_t offset = 0) {
  return {std::move(name), DType::f32, elements, Category::activations, sections::transient, offset};
}
inline Tensor whole(const Program& p, BufferId id) {
  return tensor(id, DType::f32, {fixed(p.buffers[static_cast<std::size_t>(id)].elements)});
}

/// One rank: a prologue that maps `mapped` bytes of the transient section, and an iteration that runs `ops`.
inline Plan plan_of(Program program, const std::vector<Op>& ops, std::int64_t mapped) {
  Plan plan = test::empty_plan();
  plan.phases = {{"load", When::prologue, false}, {"work", When::iteration, false}};
  Block load = block_of(program, "load", {mapping(OpKind::map, sections::transient, 0, mapped)});
  Block work = block_of(program, "work", ops);
  program.phases = {{std::move(load)}, {std::move(work)}};
  program.section(sections::transient).bytes = mapped;
  plan.programs = {std::move(program)};
  plan.program_of_rank = {0};
  return plan;
}
/// Its ops, to be changed within one expression.
inline EditedOps work(Plan& plan, std::size_t program = 0) {
  return {plan.programs[program], plan.programs[program].phases[1][0]};
}

/// Appends a block of one call to a draft's first phase.
inline void add_block(Draft& draft, std::string name, const std::vector<Op>& ops) {
  if (draft.phases.empty()) draft.phases.emplace_back();
  DraftBlock block{.name = name, .calls = {}};
  block.calls.push_back(written_call(draft, std::move(name), "", ops));
  draft.phases[0].push_back(std::move(block));
}
/// A draft of one block "work", a call.
inline Draft draft_of(std::vector<Buffer> buffers, const std::vector<Op>& ops) {
  Draft draft = test::empty_draft();
  draft.buffers = std::move(buffers);
  add_block(draft, "work", ops);
  return draft;
}
/// A block's ops over buffers, with the memory ops and events of the passes among them.
inline std::vector<Op> ops_of(const Draft& draft, std::size_t block = 0) {
  std::vector<Op> out;
  for (const DraftCall& call : draft.phases[0][block].calls) {
    auto mark = call.marks.begin();
    std::int32_t step = 0;
    const auto marks = [&] {
      for (; mark != call.marks.end() && mark->before == step; ++mark)
        out.push_back(event(mark->kind, mark->stream, mark->event));
    };
    const auto buffer = [&](BufferId slot) { return call.slots[static_cast<std::size_t>(slot)].buffer; };
    each_step(
        draft.body_of(call), call,
        [&](const DraftMemory& m, StreamId stream) {
          marks();
          out.push_back(memory(m.kind, buffer(m.slot), stream));
          ++step;
        },
        [&](Op o, std::size_t) {
          marks();
          if (!o.name.empty()) o.name = call.name + o.name;
          if (o.buffer >= 0) o.buffer = buffer(o.buffer);
          for (auto* side : {&o.inputs, &o.outputs})
            for (Tensor& t : *side) t.buffer = buffer(t.buffer);
          out.push_back(std::move(o));
          ++step;
        });
    marks();
  }
  return out;
}

/// Two ranks with programs of their own; each all-reduces twice over the family "world". Ops of "work" by index:
///   0 alloc a, 1 zero a, 2 and 3 all_reduce a, 4 free a
inline Plan two_ranks() {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16, 0)};
  const Tensor a = whole(p, 0);
  Op reduce = op(OpKind::all_reduce, {a}, {a});
  reduce.group = 0;
  Plan plan =
      plan_of(p, {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {a}), reduce, reduce, memory(OpKind::free, 0)}, 4096);
  plan.groups = {{"world", {{0, 1}}}};
  plan.programs.push_back(plan.programs[0]);
  plan.program_of_rank = {0, 1};
  return plan;
}

}  // namespace hotbunk::test
