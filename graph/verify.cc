#include "graph/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>

#include "base/parallel.h"
#include "graph/catalogue.h"
#include "graph/verify_parts.h"

namespace hotbunk {
namespace {

template <class Id>
std::size_t index_of(Id id) {
  return static_cast<std::size_t>(id);
}
template <class Id, class Named>
bool is_one_of(Id id, const std::vector<Named>& all) {
  return index_of(id) < all.size();
}

/// The parts of a collective make its whole: "" or what does not add up over the ranks of its group.
std::string check_parts(const Plan& plan, const Op& op) {
  const auto& groups = plan.groups[static_cast<std::size_t>(op.group)].groups;
  if (groups.empty() || op.inputs.empty() || op.outputs.empty()) return "";
  const auto ranks = static_cast<std::int64_t>(groups.front().size());
  const std::int64_t in = op.inputs[0].capacity(), out = op.outputs[0].capacity();
  const bool good = op.kind == OpKind::all_gather                                        ? out == ranks * in
                    : op.kind == OpKind::reduce_scatter                                  ? in == ranks * out
                    : op.kind == OpKind::all_reduce || op.kind == OpKind::broadcast      ? in == out
                    : op.kind == OpKind::all_to_all && !op.is_priced() && !is_routed(op) ? in == out && in % ranks == 0
                                                                                         : true;
  return good ? "" : fmt::format("makes {} elements of {} over {} ranks", out, in, ranks);
}

/// As many parts as places: "" or which parts of the op's moves do not meet the groups of their family.
std::string check_places(const Plan& plan, const Op& op) {
  for (const Move& move : op.moves)
    for (const Side* side : {&move.from, &move.to}) {
      const Parts& parts = side->parts;
      if (parts.who == Holds::whole || parts.family < 0) continue;
      const Within& in = parts.within;
      const std::int64_t pieces = in.family < 0 ? 1 : std::int64_t{in.count} * in.repeat;
      const auto meets = [&](GroupId id, std::int64_t places) -> std::string {
        const GroupFamily& family = plan.groups[static_cast<std::size_t>(id)];
        for (const auto& members : family.groups)
          if (std::ssize(members) != places)
            return fmt::format("moves {} parts over groups of {} in {}", places, members.size(), family.name);
        return "";
      };
      const std::int64_t parted = std::int64_t{parts.count} * parts.repeat;
      std::string bad = meets(parts.family, parts.who == Holds::mine ? parted : parted * pieces);
      if (bad.empty() && in.family >= 0) bad = meets(in.family, pieces);
      if (!bad.empty()) return bad;
    }
  return "";
}

std::span<const Dim> dims_of(const Tensor& t) { return std::span(t.shape).first(t.rank); }

/// Its dimensions name extents that are there, and lie within their capacity.
std::string check_dims(const Plan& plan, const Op& op) {
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      for (const Dim& d : dims_of(t)) {
        if (d.begin < 0) return fmt::format("has a dimension that begins at {}", d.begin);
        if (d.extent == fixed_extent) continue;
        if (!is_one_of(d.extent, plan.extents))
          return fmt::format("names extent {} of {}", static_cast<int>(d.extent), plan.extents.size());
        const Extent& e = plan.extent(d.extent);
        if (e.capacity > 0 && d.begin > e.capacity - d.size)
          return fmt::format("has {}..{} of '{}', which has a capacity of {}", d.begin, d.begin + d.size, e.name,
                             e.capacity);
      }
  return "";
}

/// The counts of its dimensions, of those that the device counts, are its last inputs: "" or what is wrong.
std::string check_counts(const Plan& plan, const Op& op) {
  const std::vector<ExtentId> counted = plan.counted_extents(op);
  if (counted.empty()) return op.has(Attr::count) ? "takes a count, and the device counts none of its dimensions" : "";
  const std::string& name = plan.extent(counted[0]).name;
  if (!op.has(Attr::count)) return fmt::format("lacks the count of '{}' among its inputs", name);
  if (op.kind == OpKind::barrier || !op.moves.empty())
    return fmt::format("has a dimension of '{}', and what it does depends on no size", name);
  const std::int64_t first = op.integer(Attr::count), behind = std::ssize(op.inputs) - std::ssize(counted);
  if (first < 0 || first != behind)
    return fmt::format("takes {} counts from input {} of {} on", counted.size(), first, op.inputs.size());
  for (std::size_t i = 0; i < counted.size(); ++i) {
    const Tensor& t = op.inputs[static_cast<std::size_t>(first) + i];
    const bool fixed = std::ranges::all_of(dims_of(t), [](const Dim& d) { return d.extent == fixed_extent; });
    if (t.dtype != DType::i64 || t.capacity() != 1 || !fixed)
      return fmt::format("takes the count of '{}' from {} {}, not from one int64", plan.extent(counted[i]).name,
                         t.capacity(), name_of(t.dtype));
  }
  return "";
}

/// Every op by itself: tensors, attributes and shapes of its kind, and that what it names exists.
std::string check_op_of(const Plan& plan, const Body& body, const Op& op) {
  const auto no_slot = [&](BufferId slot) { return slot < 0 || slot >= body.num_slots(); };
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      if (no_slot(t.buffer)) return fmt::format("names slot {} of {}", t.buffer, body.num_slots());
  const bool memory = op.kind == OpKind::alloc || op.kind == OpKind::free;
  if ((memory || op.buffer >= 0) && no_slot(op.buffer))
    return fmt::format("names slot {} of {}", op.buffer, body.num_slots());
  if (op.kind == OpKind::peer_copy)
    for (const Tensor& t : op.inputs)
      if (t.buffer >= body.num_ports) return "reads a local of its peers, who know buffers of programs only";
  if (is_event(op.kind)) return "is for calls to say, not for a body";
  if (!is_one_of(op.stream, plan.streams))
    return fmt::format("is on stream {} of {}", index_of(op.stream), plan.streams.size());
  if (std::string bad = check_dims(plan, op); !bad.empty()) return bad;
  if (std::string bad = check_counts(plan, op); !bad.empty()) return bad;
  if (std::string bad = check_op(op); !bad.empty()) return bad;
  if (std::string bad = check_moves(op, plan.groups.size()); !bad.empty()) return bad;
  if (std::string bad = check_places(plan, op); !bad.empty()) return bad;
  if (op.group >= static_cast<GroupId>(plan.groups.size())) return fmt::format("names group {}", op.group);
  return is_communication(op.kind) ? check_parts(plan, op) : "";
}

/// What a call binds exists and is large enough: "" or what is wrong. `windows`: of its body.
std::string check_call(const Plan& plan, const Program& program, const Block& block, const Call& call,
                       const SlotWindows& windows) {
  const Body& body = program.bodies[static_cast<std::size_t>(call.body)];
  if (std::ssize(call.ports) != body.num_ports)
    return fmt::format("binds {} ports of {}", call.ports.size(), body.num_ports);
  for (const Port& port : call.ports)
    if (port.buffer < 0 || static_cast<std::size_t>(port.buffer) >= program.buffers.size())
      return fmt::format("names buffer {}", port.buffer);
  if (call.locals.size() != body.locals.size())
    return fmt::format("has places for {} locals of {}", call.locals.size(), body.locals.size());
  const std::int64_t room = program.section(transient_section).bytes;
  for (std::size_t i = 0; i < call.locals.size(); ++i)
    if (const std::int64_t begin = call.locals[i], bytes = body.locals[i].bytes(); begin < 0 || begin > room - bytes)
      return fmt::format("has '{}' at bytes {}..{} of the transient section, which has {}", body.locals[i].name, begin,
                         begin + bytes, room);
  std::int32_t before = 0;
  for (const Mark& m : call.marks) {
    if (!is_one_of(m.stream, plan.streams))
      return fmt::format("has an event on stream {} of {}", index_of(m.stream), plan.streams.size());
    if (m.event < 0 || m.event >= program.num_events) return fmt::format("names event {}", m.event);
    if (m.before < before || m.before > std::ssize(body.ops))
      return fmt::format("has an event before op {} of {}, behind one before op {}", m.before, body.ops.size(), before);
    before = m.before;
  }
  if (block.enters != Enters::nothing)
    for (const Op& op : body.ops)
      if (is_communication(op.kind))
        return fmt::format("communicates ({} '{}') in a block that a rank may skip", name_of(op.kind), op.name);
  return check_windows(program, call, windows);
}

/// Bodies by themselves: their ops, and that locals are transients.
template <class Fault>
void check_bodies(const Plan& plan, const Program& program, Fault&& fault) {
  for (const Body& body : program.bodies) {
    if (body.num_ports < 0) fault(fmt::format("body {}: has {} ports", body.name, body.num_ports));
    for (const Buffer& b : body.locals)
      if (b.section != transient_section || b.elements < 0)
        fault(fmt::format("body {}: local '{}' has {} elements in {}", body.name, b.name, b.elements,
                          program.section(b.section).name));
    for (const Op& op : body.ops)
      if (const std::string bad = check_op_of(plan, body, op); !bad.empty())
        fault(fmt::format("body {}: {} '{}' {}", body.name, name_of(op.kind), op.name, bad));
  }
}

/// Slot limits name transients, each in one turn of one limit.
template <class Fault>
void check_slots(const Program& program, Fault&& fault) {
  std::set<BufferId> named;
  for (const SlotLimit& limit : program.slot_limits) {
    if (limit.slots < 1) fault(fmt::format("'{}' has {} slots", limit.name, limit.slots));
    for (const auto& turn : limit.turns)
      for (BufferId id : turn)
        if (id < 0 || static_cast<std::size_t>(id) >= program.buffers.size())
          fault(fmt::format("slots '{}' name buffer {}", limit.name, id));
        else if (const Buffer& b = program.buffers[static_cast<std::size_t>(id)]; b.section != transient_section)
          fault(fmt::format("slots '{}' name '{}', which is in section {}", limit.name, b.name,
                            program.section(b.section).name));
        else if (!named.insert(id).second) fault(fmt::format("slots '{}' name '{}' twice", limit.name, b.name));
  }
}

template <class Named>
bool names_differ(const std::vector<Named>& all) {
  std::set<std::string_view> names;
  return std::ranges::all_of(all, [&](const Named& n) { return names.insert(n.name).second; });
}

/// Streams are few, have names of their own, and the first computes.
void check_streams(const Plan& plan, Faults& faults) {
  if (plan.streams.empty() || plan.streams.size() > max_streams)
    faults.add(fmt::format("the plan has {} streams, of 1 to {}", plan.streams.size(), max_streams));
  else if (plan.stream(lead_stream).kind != StreamKind::compute)
    faults.add(fmt::format("stream '{}' comes first, where blocks begin and end, and does not compute",
                           plan.stream(lead_stream).name));
  if (!names_differ(plan.streams)) faults.add("two streams of the plan have one name");
}

/// Extents too; the first are those that every Driver counts, and what the device counts has a most.
void check_extents(const Plan& plan, Faults& faults) {
  const auto& all = plan.extents;
  const std::vector<Extent> first = Plan{}.extents;
  if (all.size() < first.size() || all.size() > max_extents)
    faults.add(fmt::format("the plan has {} extents, of {} to {}", all.size(), first.size(), max_extents));
  else if (!std::ranges::equal(first, std::span(all).first(first.size())))
    faults.add("the first extents of the plan are not 'tokens' and 'seqs' without a capacity, counted by the driver");
  if (!names_differ(all)) faults.add("two extents of the plan have one name");
  for (const Extent& e : all) {
    if (e.name == "fixed") faults.add("an extent is called 'fixed', as what has none is");
    if (e.capacity < (e.counted_by == CountedBy::device ? 1 : 0))
      faults.add(fmt::format("extent '{}', counted by the {}, has a capacity of {}", e.name, name_of(e.counted_by),
                             e.capacity));
  }
}

/// So with sections, of which the first is the device's; and whatever names one names one that is there.
template <class Fault>
bool check_sections(const Program& program, Fault&& fault) {
  const auto& sections = program.sections;
  if (sections.empty() || sections.size() > max_sections)
    return fault(fmt::format("has {} sections, of 1 to {}", sections.size(), max_sections)), false;
  if (program.section(transient_section).space != Space::device)
    return fault(fmt::format("has transients in section '{}', which is the host's", sections[0].name)), false;
  if (!names_differ(sections)) return fault("has two sections of one name"), false;
  bool good = true;
  const auto check = [&](SectionId id, std::string_view what, const std::string& name) {
    if (is_one_of(id, sections)) return;
    good = false;
    fault(fmt::format("{} '{}' names section {} of {}", what, name, index_of(id), sections.size()));
  };
  for (const Buffer& b : program.buffers) check(b.section, "buffer", b.name);
  for (const Body& body : program.bodies) {
    for (const Buffer& b : body.locals) check(b.section, "local", b.name);
    for (const Op& op : body.ops) check(op.section, "op", op.name);
  }
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks) check(block.section, "block", block.name);
  return good;
}

/// The walks know iterations with all phases and without those that are periodic, and no others.
void check_periods(const Plan& plan, Faults& faults) {
  std::int32_t period = 1;
  for (const PhaseInfo& p : plan.phases) {
    if (p.every == 1) continue;
    if (p.every < 1 || p.when != When::iteration)
      faults.add(fmt::format("phase {}: every {} is for phases of iterations, and above 1", p.name, p.every));
    else if (p.driven) faults.add(fmt::format("phase {}: a driven phase does not skip iterations", p.name));
    else if (std::ranges::any_of(p.players, [](const Player& player) { return player.steps_back != 0; }))
      faults.add(fmt::format("phase {}: what skips iterations is played in the walk's own, none back", p.name));
    else if (period != 1 && p.every != period)
      faults.add(fmt::format("phase {}: runs every {} iterations, another phase every {}", p.name, p.every, period));
    else period = p.every;
  }
}

void check_shape(const Plan& plan, std::size_t index, Faults& faults) {
  const Program& program = plan.programs[index];
  const auto fault = [&](const std::string& text) { faults.add(fmt::format("program {}: {}", index, text)); };
  if (program.phases.size() != plan.phases.size())
    return fault(fmt::format("has {} phases, the plan {}", program.phases.size(), plan.phases.size()));
  if (!check_sections(program, fault)) return;
  for (const Buffer& b : program.buffers) {
    const std::int64_t end = program.section(b.section).bytes;
    if (b.elements < 0 || b.offset < 0 || b.offset + b.bytes() > end)
      fault(fmt::format("buffer '{}' takes bytes {}..{} of section {}, which has {}", b.name, b.offset,
                        b.offset + b.bytes(), program.section(b.section).name, end));
  }
  check_slots(program, fault);
  check_bodies(plan, program, fault);
  if (faults.any()) return;
  std::vector<SlotWindows> windows;
  for (const Body& body : program.bodies) windows.push_back(windows_of(body));
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      for (const Call& call : block.calls) {
        const bool known = call.body >= 0 && static_cast<std::size_t>(call.body) < program.bodies.size();
        const std::string bad =
            known ? check_call(plan, program, block, call, windows[static_cast<std::size_t>(call.body)])
                  : fmt::format("names body {}", call.body);
        if (!bad.empty())
          fault(fmt::format("phase {}, block {}, call '{}': {}", plan.phases[p].name, block.name, call.name, bad));
      }
}

/// check(i, faults) for i of [0, n); what they found, in the order of i.
template <class Check>
std::vector<std::string> faults_of(std::size_t n, std::size_t limit, Check&& check) {
  std::vector<Faults> parts(n, Faults(limit));
  in_parallel(n, [&](std::size_t i) { check(i, parts[i]); });
  Faults all(limit);
  for (Faults& found : parts)
    for (std::string& line : found.take()) all.add(std::move(line));
  return all.take();
}

}  // namespace

std::vector<std::string> verify(const Plan& plan, std::size_t limit) {
  Faults faults(limit);
  for (std::int32_t p : plan.program_of_rank)
    if (p < 0 || static_cast<std::size_t>(p) >= plan.programs.size())
      faults.add(fmt::format("a rank names program {}", p));
  check_streams(plan, faults);
  check_extents(plan, faults);
  check_periods(plan, faults);
  if (!faults.any()) check_roles(plan, faults);  // which asks ranks for their programs
  if (auto found = faults.take(); !found.empty()) return found;
  auto found = faults_of(plan.programs.size(), limit, [&](std::size_t i, Faults& f) { check_shape(plan, i, f); });
  if (!found.empty()) return found;
  found = faults_of(3 * plan.programs.size(), limit, [&](std::size_t i, Faults& f) {
    if (i % 3 == 0) check_memory_and_order(plan, i / 3, f);
    else if (i % 3 == 1) check_written(plan, i / 3, f);
    else check_waits(plan, i / 3, f);
  });
  if (!found.empty()) return found;
  check_conversations(plan, faults);
  check_pairs(plan, faults);
  if (!faults.any()) check_deadlock(plan, faults);
  return faults.take();
}

}  // namespace hotbunk
