// Hand-built plans: every op by name. For tests of what interprets plans.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/blocks.h"

namespace hotbunk::toy {

inline Tensor tensor(BufferId buffer, Dim extent, DType dtype = DType::f32) {
  Tensor t;
  t.buffer = buffer;
  t.dtype = dtype;
  t.rank = 1;
  t.shape[0] = extent;
  return t;
}

inline Op op(OpKind kind, StreamId stream, std::string name) {
  Op o;
  o.kind = kind;
  o.stream = stream;
  o.name = std::move(name);
  return o;
}
/// A kernel without tensors: only its price matters.
inline Op kernel(std::string name, StreamId stream = streams::compute) {
  return op(OpKind::zero, stream, std::move(name));
}
inline Op record(EventId event, StreamId stream) {
  Op o = op(OpKind::record, stream, "record");
  o.event = event;
  return o;
}
inline Op wait(EventId event, StreamId stream) {
  Op o = op(OpKind::wait, stream, "wait");
  o.event = event;
  return o;
}
/// In place over `elements` fp32 of buffer 0.
inline Op all_reduce(std::string name, Dim elements, GroupId group = 0, StreamId stream = streams::reduce) {
  Op o = op(OpKind::all_reduce, stream, std::move(name));
  o.inputs = o.outputs = {tensor(0, elements)};
  o.group = group;
  return o;
}
inline Op all_gather(std::string name, Dim each, Dim all, GroupId group = 0, StreamId stream = streams::gather) {
  Op o = op(OpKind::all_gather, stream, std::move(name));
  o.inputs = {tensor(0, each)};
  o.outputs = {tensor(0, all)};
  o.group = group;
  return o;
}
inline Op transfer(OpKind kind, std::string name, Dim elements, std::int64_t peer, StreamId stream = streams::control) {
  Op o = op(kind, stream, std::move(name));
  (kind == OpKind::send ? o.inputs : o.outputs) = {tensor(0, elements)};
  o.attrs = {{Attr::peer, peer}};
  o.group = 0;
  return o;
}
/// `sent` fp32 of buffer 0 go to the rank at `peer`, `received` of buffer 1 come from the one at `source`.
inline Op exchange(std::string name, Dim sent, Dim received, std::int64_t peer, std::int64_t source,
                   bool relative = true, StreamId stream = streams::control) {
  Op o = op(OpKind::send_recv, stream, std::move(name));
  o.inputs = {tensor(0, sent)}, o.outputs = {tensor(1, received)};
  o.attrs = {{Attr::peer, peer}, {Attr::source, source}, {Attr::relative, std::int64_t{relative ? 1 : 0}}};
  o.group = 0;
  return o;
}
/// With the counts of its dimensions, of those that the device counts.
inline Op counted(Op o, const std::vector<Tensor>& counts) {
  o.attrs.emplace_back(Attr::count, std::ssize(o.inputs));
  o.inputs.insert(o.inputs.end(), counts.begin(), counts.end());
  return o;
}
inline Op memory(OpKind kind, BufferId buffer, std::string name) {
  Op o = op(kind, streams::compute, std::move(name));
  o.buffer = buffer;
  return o;
}
inline Op mapping(OpKind kind, SectionId section, std::int64_t begin, std::int64_t end, std::string name = "arena") {
  Op o = op(kind, streams::compute, std::move(name));
  o.section = section;
  o.map_begin = begin;
  o.map_end = end;
  return o;
}

/// One phase per name; programs[rank][phase] = ops of its only block; family 0, "world", is all ranks.
inline Plan plan_of(std::vector<std::string> phases, std::vector<std::vector<std::vector<Op>>> programs) {
  Plan plan = test::empty_plan();
  plan.scenario = "toy";
  GroupFamily world{"world", {{}}};
  for (std::size_t r = 0; r < programs.size(); ++r) {
    world.groups[0].push_back(static_cast<Rank>(r));
    Program p = test::empty_program();
    p.num_events = 16;
    for (const auto& ops : programs[r]) p.phases.push_back({test::block_of(p, "only", ops)});
    plan.programs.push_back(std::move(p));
    plan.program_of_rank.push_back(static_cast<std::int32_t>(r));
  }
  plan.groups = {world};
  for (auto& name : phases) plan.phases.push_back({std::move(name), When::iteration, false});
  return plan;
}
inline Plan plan_of(std::vector<std::vector<Op>> programs) {
  std::vector<std::vector<std::vector<Op>>> nested;
  for (auto& ops : programs) nested.push_back({std::move(ops)});
  return plan_of({"work"}, std::move(nested));
}

}  // namespace hotbunk::toy
