// Hand-built plans for the simulator's tests: every op by name, its cost in nanoseconds in a table beside it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "exec/backend.h"
#include "sim/sim_backend.h"

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
inline Op kernel(std::string name, StreamId stream = StreamId::compute) {
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
inline Op all_reduce(std::string name, Dim elements, GroupId group = 0, StreamId stream = StreamId::reduce) {
  Op o = op(OpKind::all_reduce, stream, std::move(name));
  o.inputs = o.outputs = {tensor(0, elements)};
  o.group = group;
  return o;
}
inline Op all_gather(std::string name, Dim each, Dim all, GroupId group = 0, StreamId stream = StreamId::gather) {
  Op o = op(OpKind::all_gather, stream, std::move(name));
  o.inputs = {tensor(0, each)};
  o.outputs = {tensor(0, all)};
  o.group = group;
  return o;
}
inline Op transfer(OpKind kind, std::string name, Dim elements, std::int64_t peer,
                   StreamId stream = StreamId::control) {
  Op o = op(kind, stream, std::move(name));
  (kind == OpKind::send ? o.inputs : o.outputs) = {tensor(0, elements)};
  o.attrs = {{Attr::peer, peer}};
  o.group = 0;
  return o;
}
inline Op memory(OpKind kind, BufferId buffer, std::string name) {
  Op o = op(kind, StreamId::compute, std::move(name));
  o.buffer = buffer;
  return o;
}
inline Op mapping(OpKind kind, Section section, std::int64_t begin, std::int64_t end, std::string name = "arena") {
  Op o = op(kind, StreamId::compute, std::move(name));
  o.section = section;
  o.map_begin = begin;
  o.map_end = end;
  return o;
}

/// One phase per name; programs[rank][phase] = ops of its only block; family 0, "world", is all ranks.
inline Plan plan_of(std::vector<std::string> phases, std::vector<std::vector<std::vector<Op>>> programs) {
  Plan plan;
  plan.scenario = "toy";
  GroupFamily world{"world", {{}}};
  for (std::size_t r = 0; r < programs.size(); ++r) {
    world.groups[0].push_back(static_cast<Rank>(r));
    Program p;
    p.num_events = 16;
    for (auto& ops : programs[r]) p.phases.push_back({Block{"only", std::move(ops)}});
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

/// Price by the op's name; what is not named is free.
struct Prices final : OpCost {
  std::map<std::string, std::int64_t> by_name;
  Prices(std::initializer_list<std::pair<const std::string, std::int64_t>> prices) : by_name(prices) {}
  std::int64_t nanoseconds(const Plan&, Rank, const Op& o, const Args&) const override {
    const auto at = by_name.find(o.name);
    return at == by_name.end() ? 0 : at->second;
  }
};

inline ClusterSpec one_rank_per_device() { return {}; }

/// How often and with which sizes each phase's block runs on each rank of an iteration.
struct Fixed final : Driver {
  std::int64_t runs = 1;
  Sizes sizes;
  std::map<std::pair<Rank, std::int16_t>, std::int64_t> done;
  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    std::int64_t& n = done[{r, phase}];
    if (n == runs) return n = 0, std::nullopt;
    ++n;
    Args args;
    args.step = step;
    args.sizes = sizes;
    return args;
  }
  void feed(Rank, const Op&, const Args&, std::span<std::byte>) override {}
  void fetch(Rank, const Op&, const Args&, std::span<const std::byte>) override {}
  void completed(Rank, const Args&, std::int16_t) override {}
  bool wants_results() const override { return false; }
  void report(Trace&) const override {}
};

/// Walks the plan as `execute` does: one iteration per step, `runs` runs of every block per phase.
inline Result<Trace> simulate(Plan& plan, const OpCost& cost, std::int64_t runs = 1, std::int32_t steps = 1,
                              SimOptions options = {}, const ClusterSpec& cluster = one_rank_per_device(),
                              Sizes sizes = {}) {
  for (PhaseInfo& phase : plan.phases) phase.driven = true;
  SimBackend backend(cluster, cost, options);
  Fixed driver;
  driver.runs = runs;
  driver.sizes = sizes;
  RunOptions run;
  run.steps = steps;
  for (Rank r = 0; r < plan.num_ranks(); ++r) run.local_ranks.push_back(r);
  return execute(plan, backend, driver, run);
}

/// The spans of an op, in order of rank and time: {start, end}.
inline std::vector<std::pair<std::int64_t, std::int64_t>> times(const Trace& trace, const std::string& name) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (const Span& s : trace.spans)
    if (trace.names[static_cast<std::size_t>(s.name)] == name) out.emplace_back(s.start_ns, s.end_ns);
  return out;
}
using Times = std::vector<std::pair<std::int64_t, std::int64_t>>;

}  // namespace hotbunk::toy
