#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "graph/byte_ranges.h"
#include "graph/clock.h"
#include "graph/conflicts.h"
#include "graph/print.h"
#include "graph/section_states.h"
#include "graph/verify_parts.h"
#include "graph/written.h"

namespace hotbunk {
namespace {

/// Calls on_block(visit, block) for what a rank runs, and on_end(when) behind the prologue, each iteration and the
/// epilogue.
template <class OnBlock, class OnEnd>
void walk(const Plan& plan, const Program& program, OnBlock&& on_block, OnEnd&& on_end) {
  SectionStates states(program);
  for (const WalkTurn& turn : walk_turns(plan, program)) {
    for (const BlockVisit& visit : block_visits(plan, program, turn)) {
      const Block& block = block_at(program, visit);
      if (states.skips(block)) continue;
      on_block(visit, block);
      states.ran(block);
    }
    on_end(turn.when);
  }
}

/// Where a walk is, as faults tell it.
class Place {
 public:
  Place(const Plan& plan, std::size_t program) : plan_(plan), program_(program) {}
  void enter(const BlockVisit& at) { at_ = at, op_ = {}; }
  void enter(const BoundOp& op) { op_ = op; }

  std::string operator()(std::string_view text) const { return operator()(program_, text); }
  std::string operator()(std::size_t program, std::string_view text) const {
    if (at_.phase < 0) return fmt::format("program {}: {}", program, text);
    const Block& block = block_at(plan_.programs[program_], at_);
    const std::string place = fmt::format("program {}: phase {}, block {}", program,
                                          plan_.phases[static_cast<std::size_t>(at_.phase)].name, block.name);
    if (op_.op == nullptr) return fmt::format("{}: {}", place, text);
    return fmt::format("{}, {}: {}", place, where_in_block(op_), text);
  }

 private:
  const Plan& plan_;
  std::size_t program_;
  BlockVisit at_{-1, -1};
  BoundOp op_;  // of the block, or none
};

class MemoryAndOrder {
 public:
  MemoryAndOrder(const Plan& plan, std::size_t index, Faults& faults)
      : plan_(plan),
        program_(plan.programs[index]),
        place_(plan, index),
        faults_(faults),
        live_(program_.buffers.size(), false) {
    recorded_.assign(static_cast<std::size_t>(std::max(program_.num_events, 0)), before_all);
  }

  void run() {
    std::vector<bool> before = live_;
    walk(
        plan_, program_, [&](const BlockVisit& visit, const Block& block) { check_block(visit, block); },
        [&](When when) {
          if (when == When::iteration) check_balance(before);
          before = live_;
        });
  }

 private:
  void fault(const std::string& text) { faults_.add(place_(text)); }

  // Streams are joined at block borders (dependencies.cc); the check proves that too, through the clocks below.
  void check_block(const BlockVisit& visit, const Block& block) {
    place_.enter(visit);
    for (const Call& call : block.calls) {
      local_live_.assign(program_.bodies[static_cast<std::size_t>(call.body)].locals.size(), false);
      const auto on_op = [&](const BoundOp& op) {
        if (faults_.full()) return;
        place_.enter(op);
        check_memory(op);
        check_order(op);
      };
      each_step(program_, block, call, on_op, [&](const Mark& m) { check_mark(m); });
      if (faults_.full()) return;
      check_ended(call);
    }
    place_.enter(visit);
    check_entered(block);
    place_.enter(BlockVisit{-1, -1});
  }

  void check_balance(const std::vector<bool>& before) {
    for (std::size_t i = 0; i < live_.size(); ++i) {
      if (live_[i] == before[i]) continue;
      const std::string& name = program_.buffers[i].name;
      fault(live_[i] ? fmt::format("buffer '{}' is still alive after an iteration that allocated it", name)
                     : fmt::format("buffer '{}' was alive before an iteration that freed it", name));
    }
  }

  /// A block that wakes or puts to sleep does it to the whole section.
  void check_entered(const Block& block) {
    if (block.enters == Enters::nothing) return;
    const bool awake = block.enters == Enters::awake;
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (const Buffer& b = program_.buffers[i]; b.section == block.section && live_[i] != awake)
        fault(fmt::format("leaves {} {}, but '{}' is {}", program_.section(block.section).name, name_of(block.enters),
                          b.name, awake ? "not alive" : "alive"));
    if (!awake && !mapped_[static_cast<std::size_t>(block.section)].empty())
      fault(fmt::format("leaves {} asleep, but part of it is mapped", program_.section(block.section).name));
  }

  /// Locals end with their call.
  void check_ended(const Call& call) {
    const Body& body = program_.bodies[static_cast<std::size_t>(call.body)];
    for (std::size_t i = 0; i < local_live_.size(); ++i)
      if (local_live_[i]) fault(fmt::format("ends with '{}{}' alive", call.name, body.locals[i].name));
  }

  std::vector<bool>::reference live(const BoundOp& op, const BoundBuffer& b, BufferId slot) {
    return b.is_local() ? local_live_[static_cast<std::size_t>(slot - op.body().num_ports)]
                        : live_[static_cast<std::size_t>(b.id)];
  }

  void check_memory(const BoundOp& op) {
    switch (op->kind) {
      case OpKind::alloc:
        return check_alloc(op.allocated(), live(op, op.allocated(), op->buffer));
      case OpKind::free:
        return check_free(op.allocated(), live(op, op.allocated(), op->buffer));
      case OpKind::map:
      case OpKind::unmap:
        return check_map(*op);
      default:
        break;
    }
    for (const auto* side : {&op->inputs, &op->outputs})
      for (const Tensor& t : *side)
        if (const BoundBuffer b = op.buffer(t); !live(op, b, t.buffer))
          fault(fmt::format("touches '{}', which is not alive", b.name()));
  }

  /// Buffers alive in the section that have bytes in [begin, end): looked for only to name them in a fault.
  std::vector<const Buffer*> alive_in(SectionId section, std::int64_t begin, std::int64_t end) const {
    std::vector<const Buffer*> out;
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (const Buffer& b = program_.buffers[i]; live_[i] && b.section == section)
        if (b.offset < end && b.offset + b.bytes() > begin) out.push_back(&b);
    return out;
  }

  void check_alloc(const BoundBuffer& b, std::vector<bool>::reference is_live) {
    const std::int64_t end = b.offset + b.bytes();
    if (is_live) return fault(fmt::format("allocates '{}', which is alive", b.name()));
    ByteRanges& taken = taken_[static_cast<std::size_t>(b.section())];
    if (taken.meets(b.offset, end)) {
      const auto others = alive_in(b.section(), b.offset, end);
      for (const Buffer* other : others) fault(fmt::format("'{}' overlaps '{}'", b.name(), other->name));
      if (others.empty()) fault(fmt::format("'{}' overlaps a local of its call", b.name()));
    }
    is_live = true;
    taken.add(b.offset, end);
    if (!mapped_[static_cast<std::size_t>(b.section())].holds(b.offset, end))
      fault(fmt::format("'{}' is allocated where nothing is mapped (section {} asleep?)", b.name(), b.section_name()));
  }

  void check_free(const BoundBuffer& b, std::vector<bool>::reference is_live) {
    if (!is_live) return fault(fmt::format("frees '{}', which is not alive", b.name()));
    is_live = false;
    taken_[static_cast<std::size_t>(b.section())].remove(b.offset, b.offset + b.bytes());
  }

  void check_map(const Op& op) {
    ByteRanges& mapped = mapped_[static_cast<std::size_t>(op.section)];
    const std::int64_t begin = op.map_begin, end = op.map_end;
    if (begin % plan_.chunk_bytes != 0 || end % plan_.chunk_bytes != 0 || begin > end)
      return fault(fmt::format("range {}..{} is not made of chunks of {}", begin, end, plan_.chunk_bytes));
    if (op.kind == OpKind::map) {
      if (mapped.meets(begin, end))
        return fault(
            fmt::format("maps {}..{} of {}, part of which is mapped", begin, end, program_.section(op.section).name));
      return mapped.add(begin, end);
    }
    if (!mapped.holds(begin, end))
      return fault(fmt::format("unmaps {}..{} of {}, part of which is not mapped", begin, end,
                               program_.section(op.section).name));
    if (taken_[static_cast<std::size_t>(op.section)].meets(begin, end))
      for (const Buffer* b : alive_in(op.section, begin, end))
        fault(fmt::format("unmaps '{}', which is alive", b->name));
    mapped.remove(begin, end);
  }

  /// Happens-before as the devices implement it: clocks travel only through record and wait.
  void check_mark(const Mark& m) {
    Clock& mine = clocks_[static_cast<std::size_t>(m.stream)];
    Clock& then = recorded_[static_cast<std::size_t>(m.event)];
    if (m.kind == OpKind::record) then = mine;
    else if (then[static_cast<std::size_t>(m.stream)] < 0)
      fault(fmt::format("waits for event {}, which nobody recorded", m.event));
    else merge(mine, then);
  }

  void check_order(const BoundOp& bound) {
    const Op& op = *bound;
    const auto s = static_cast<std::size_t>(op.stream);
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) return;
    const std::int32_t index = ++sequence_;
    each_access(bound, -1, [&](const Access& a) {  // by address: whose it is does not matter
      conflicts_.touch(a, op.stream, index, [&](StreamId t, std::int32_t earlier) {
        if (earlier != index && clocks_[s][static_cast<std::size_t>(t)] < earlier)
          fault(fmt::format("bytes {}..{} of {} are also touched on stream {} with no event between", a.begin, a.end,
                            program_.section(a.section).name, plan_.stream(t).name));
      });
    });
    clocks_[s][s] = index;
  }

  const Plan& plan_;
  const Program& program_;
  Place place_;
  Faults& faults_;
  std::vector<bool> live_, local_live_;                  // by buffer; by local of the call at hand
  std::array<ByteRanges, max_sections> taken_, mapped_;  // by buffers that are alive; by maps
  ConflictMap conflicts_;
  std::array<Clock, max_streams> clocks_{};
  std::vector<Clock> recorded_;  // by event; -1: not yet
  std::int32_t sequence_ = 0;
};

/// One account for each kind of rank: who writes other bytes than others.
class Written {
 public:
  Written(const Plan& plan, std::size_t index, Faults& faults)
      : plan_(plan), program_(plan.programs[index]), place_(plan, index), faults_(faults) {
    for (Places& places : writers_of(plan, program_)) accounts_.push_back({std::move(places), {}});
  }

  void run() {
    walk(
        plan_, program_,
        [&](const BlockVisit& visit, const Block& block) {
          place_.enter(visit);
          each_op(program_, block, [&](const BoundOp& op) {
            if (!faults_.full()) check(op);
          });
        },
        [](When) {});
  }

 private:
  struct Account {
    Places places;
    WrittenBytes bytes;
  };

  /// In program order: check_order proves that the devices keep to it where it matters.
  void check(const BoundOp& op) {
    place_.enter(op);
    for (Account& a : accounts_) {
      if (op->kind == OpKind::alloc) {
        a.bytes.alloc(op.allocated());
        continue;
      }
      for (const Tensor* t : a.bytes.unwritten(op, a.places))
        faults_.add(place_(fmt::format("reads bytes of '{}' that nobody wrote since it was allocated{}",
                                       op.buffer(*t).name(), whom(a.places))));
      for (const auto& [t, how] : a.bytes.misread(op))
        faults_.add(
            place_(fmt::format("reads bytes of '{}' that are {}{}", op.buffer(*t).name(), how, whom(a.places))));
      a.bytes.write(op, a.places);
    }
  }

  /// Which ranks, where they differ.
  std::string whom(const Places& places) const {
    std::string out;
    if (accounts_.size() > 1)
      for (std::size_t f = 0; f < places.size(); ++f)
        if (places[f] > 0) out += fmt::format(", at place {} of {}", places[f], plan_.groups[f].name);
    return out;
  }

  const Plan& plan_;
  const Program& program_;
  Place place_;
  Faults& faults_;
  std::vector<Account> accounts_;
};

}  // namespace

void check_memory_and_order(const Plan& plan, std::size_t program, Faults& faults) {
  MemoryAndOrder(plan, program, faults).run();
}

void check_written(const Plan& plan, std::size_t program, Faults& faults) { Written(plan, program, faults).run(); }

}  // namespace hotbunk
