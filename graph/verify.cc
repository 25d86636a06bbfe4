#include "graph/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <tuple>

#include "base/parallel.h"
#include "graph/byte_ranges.h"
#include "graph/catalogue.h"
#include "graph/conflicts.h"
#include "graph/section_states.h"
#include "graph/written.h"

namespace hotbunk {
namespace {

class Faults {
 public:
  explicit Faults(std::size_t limit) : limit_(limit) {}
  bool full() const { return lines_.size() >= limit_; }
  void add(std::string line) {
    if (!full()) lines_.push_back(std::move(line));
  }
  std::vector<std::string> take() { return std::move(lines_); }

 private:
  std::size_t limit_;
  std::vector<std::string> lines_;
};

/// The parts of a collective make its whole: "" or what does not add up over the ranks of its group.
std::string check_parts(const Plan& plan, const Op& op) {
  const auto& groups = plan.groups[static_cast<std::size_t>(op.group)].groups;
  if (groups.empty() || op.inputs.empty() || op.outputs.empty()) return "";
  const auto ranks = static_cast<std::int64_t>(groups.front().size());
  const std::int64_t in = op.inputs[0].capacity(), out = op.outputs[0].capacity();
  const bool good = op.kind == OpKind::all_gather                                   ? out == ranks * in
                    : op.kind == OpKind::reduce_scatter                             ? in == ranks * out
                    : op.kind == OpKind::all_reduce || op.kind == OpKind::broadcast ? in == out
                                                                                    : true;
  return good ? "" : fmt::format("makes {} elements of {} over {} ranks", out, in, ranks);
}

/// Walks one program as a rank would: prologue, two iterations (the second sees what the first left), epilogue.
class ProgramCheck {
 public:
  ProgramCheck(const Plan& plan, std::size_t index, Faults& faults)
      : plan_(plan),
        program_(plan.programs[index]),
        index_(index),
        faults_(faults),
        live_(program_.buffers.size(), false),
        written_(program_) {
    Clock never;
    never.fill(-1);
    recorded_.assign(static_cast<std::size_t>(std::max(program_.num_events, 0)), never);
  }

  void run() {
    if (!check_shape()) return;
    states_.emplace(program_);
    for (When when : {When::prologue, When::iteration, When::iteration, When::epilogue}) {
      const std::vector<bool> before = live_;
      for (const BlockVisit& visit : block_visits(plan_, program_, when)) {
        if (faults_.full()) return;
        check_block(visit);
      }
      if (when != When::iteration) continue;
      for (std::size_t i = 0; i < live_.size(); ++i) {
        if (live_[i] == before[i]) continue;
        const std::string& name = program_.buffers[i].name;
        fault(live_[i] ? fmt::format("buffer '{}' is still alive after an iteration that allocated it", name)
                       : fmt::format("buffer '{}' was alive before an iteration that freed it", name));
      }
    }
  }

 private:
  const Buffer& buffer(BufferId id) const { return program_.buffers[static_cast<std::size_t>(id)]; }
  void fault(const std::string& text) { faults_.add(fmt::format("program {}: {}{}", index_, where(), text)); }

  /// Where the walk is; written only when something is wrong there.
  std::string where() const {
    if (at_.phase < 0) return "";
    const auto phase = static_cast<std::size_t>(at_.phase);
    const Block& block = program_.phases[phase][static_cast<std::size_t>(at_.block)];
    const std::string place = fmt::format("phase {}, block {}", plan_.phases[phase].name, block.name);
    if (op_ == nullptr) return place + ": ";
    return fmt::format("{}, op {} ({} '{}'): ", place, op_ - block.ops.data(), name_of(op_->kind), op_->name);
  }

  bool check_shape() {
    if (program_.phases.size() != plan_.phases.size()) {
      fault(fmt::format("has {} phases, the plan {}", program_.phases.size(), plan_.phases.size()));
      return false;
    }
    bool good = true;
    for (const Buffer& b : program_.buffers) {
      const std::int64_t end = program_.section_bytes[static_cast<std::size_t>(b.section)];
      if (b.elements < 0 || b.offset < 0 || b.offset + b.bytes() > end) {
        fault(fmt::format("buffer '{}' takes bytes {}..{} of section {}, which has {}", b.name, b.offset,
                          b.offset + b.bytes(), name_of(b.section), end));
        good = false;
      }
    }
    for (std::size_t p = 0; p < plan_.phases.size(); ++p)
      for (const Block& block : program_.phases[p])
        for (const Op& op : block.ops) {
          std::string bad = check_op(program_, op);
          if (bad.empty() && op.group >= static_cast<GroupId>(plan_.groups.size()))
            bad = fmt::format("names group {}", op.group);
          if (bad.empty() && is_communication(op.kind)) bad = check_parts(plan_, op);
          const bool memory = op.kind == OpKind::alloc || op.kind == OpKind::free;
          if (bad.empty() && memory &&
              (op.buffer < 0 || static_cast<std::size_t>(op.buffer) >= program_.buffers.size()))
            bad = fmt::format("names buffer {}", op.buffer);
          const bool event = op.kind == OpKind::record || op.kind == OpKind::wait;
          if (bad.empty() && event && (op.event < 0 || op.event >= program_.num_events))
            bad = fmt::format("names event {}", op.event);
          if (bad.empty() && block.enters != Enters::nothing && is_communication(op.kind))
            bad = "communicates in a block that a rank may skip";
          if (bad.empty()) continue;
          fault(fmt::format("phase {}, block {}: {} '{}' {}", plan_.phases[p].name, block.name, name_of(op.kind),
                            op.name, bad));
          good = false;
        }
    return good;
  }

  void check_block(const BlockVisit& visit) {
    const Block& block = program_.phases[static_cast<std::size_t>(visit.phase)][static_cast<std::size_t>(visit.block)];
    if (states_->skips(block)) return;
    // Streams are joined at block borders (dependencies.cc); the check proves that too, through the clocks below.
    at_ = visit;
    for (const Op& op : block.ops) {
      if (faults_.full()) break;
      op_ = &op;
      check_memory(op);
      check_written(op);
      check_order(op);
    }
    op_ = nullptr;
    states_->ran(block);
    check_entered(block);
    at_ = nowhere;
  }

  /// A block that wakes or puts to sleep does it to the whole section.
  void check_entered(const Block& block) {
    if (block.enters == Enters::nothing) return;
    const bool awake = block.enters == Enters::awake;
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (const Buffer& b = program_.buffers[i]; b.section == block.section && live_[i] != awake)
        fault(fmt::format("leaves {} {}, but '{}' is {}", name_of(block.section), name_of(block.enters), b.name,
                          awake ? "not alive" : "alive"));
    if (!awake && !mapped_[static_cast<std::size_t>(block.section)].empty())
      fault(fmt::format("leaves {} asleep, but part of it is mapped", name_of(block.section)));
  }

  void check_memory(const Op& op) {
    switch (op.kind) {
      case OpKind::alloc:
        return check_alloc(op.buffer);
      case OpKind::free:
        return check_free(op.buffer);
      case OpKind::map:
      case OpKind::unmap:
        return check_map(op);
      default:
        break;
    }
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side)
        if (t.buffer >= 0 && !live_[static_cast<std::size_t>(t.buffer)])
          fault(fmt::format("touches '{}', which is not alive", buffer(t.buffer).name));
  }

  /// In program order: check_order proves that the devices keep to it where it matters.
  void check_written(const Op& op) {
    if (op.kind == OpKind::alloc) return written_.alloc(buffer(op.buffer));
    for (const Tensor* t : written_.run(op))
      fault(fmt::format("reads bytes of '{}' that nobody wrote since it was allocated", buffer(t->buffer).name));
  }

  /// Buffers alive in the section that have bytes in [begin, end): looked for only to name them in a fault.
  std::vector<const Buffer*> alive_in(Section section, std::int64_t begin, std::int64_t end) const {
    std::vector<const Buffer*> out;
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (const Buffer& b = program_.buffers[i]; live_[i] && b.section == section)
        if (b.offset < end && b.offset + b.bytes() > begin) out.push_back(&b);
    return out;
  }

  void check_alloc(BufferId id) {
    const Buffer& b = buffer(id);
    const std::int64_t end = b.offset + b.bytes();
    if (live_[static_cast<std::size_t>(id)]) return fault(fmt::format("allocates '{}', which is alive", b.name));
    ByteRanges& taken = taken_[static_cast<std::size_t>(b.section)];
    if (taken.meets(b.offset, end))
      for (const Buffer* other : alive_in(b.section, b.offset, end))
        fault(fmt::format("'{}' overlaps '{}'", b.name, other->name));
    live_[static_cast<std::size_t>(id)] = true;
    taken.add(b.offset, end);
    if (!mapped_[static_cast<std::size_t>(b.section)].holds(b.offset, end))
      fault(fmt::format("'{}' is allocated where nothing is mapped (section {} asleep?)", b.name, name_of(b.section)));
  }

  void check_free(BufferId id) {
    const Buffer& b = buffer(id);
    if (!live_[static_cast<std::size_t>(id)]) return fault(fmt::format("frees '{}', which is not alive", b.name));
    live_[static_cast<std::size_t>(id)] = false;
    taken_[static_cast<std::size_t>(b.section)].remove(b.offset, b.offset + b.bytes());
  }

  void check_map(const Op& op) {
    ByteRanges& mapped = mapped_[static_cast<std::size_t>(op.section)];
    const std::int64_t begin = op.map_begin, end = op.map_end;
    if (begin % plan_.chunk_bytes != 0 || end % plan_.chunk_bytes != 0 || begin > end)
      return fault(fmt::format("range {}..{} is not made of chunks of {}", begin, end, plan_.chunk_bytes));
    if (op.kind == OpKind::map) {
      if (mapped.meets(begin, end))
        return fault(fmt::format("maps {}..{} of {}, part of which is mapped", begin, end, name_of(op.section)));
      return mapped.add(begin, end);
    }
    if (!mapped.holds(begin, end))
      return fault(fmt::format("unmaps {}..{} of {}, part of which is not mapped", begin, end, name_of(op.section)));
    if (taken_[static_cast<std::size_t>(op.section)].meets(begin, end))
      for (const Buffer* b : alive_in(op.section, begin, end))
        fault(fmt::format("unmaps '{}', which is alive", b->name));
    mapped.remove(begin, end);
  }

  using Clock = std::array<std::int32_t, num_streams>;

  /// Happens-before as the devices implement it: clocks travel only through record and wait.
  void check_order(const Op& op) {
    const auto s = static_cast<std::size_t>(op.stream);
    if (op.kind == OpKind::record) {
      recorded_[static_cast<std::size_t>(op.event)] = clocks_[s];
      return;
    }
    if (op.kind == OpKind::wait) {
      const Clock& then = recorded_[static_cast<std::size_t>(op.event)];
      if (then[s] < 0) return fault(fmt::format("waits for event {}, which nobody recorded", op.event));
      for (std::size_t t = 0; t < num_streams; ++t) clocks_[s][t] = std::max(clocks_[s][t], then[t]);
      return;
    }
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) return;
    const std::int32_t index = ++sequence_;
    each_access(program_, op, [&](const Access& a) {
      conflicts_.touch(a, op.stream, index, [&](StreamId t, std::int32_t earlier) {
        if (earlier != index && clocks_[s][static_cast<std::size_t>(t)] < earlier)
          fault(fmt::format("bytes {}..{} of {} are also touched on stream {} with no event between", a.begin, a.end,
                            name_of(a.section), name_of(t)));
      });
    });
    clocks_[s][s] = index;
  }

  const Plan& plan_;
  const Program& program_;
  std::size_t index_;
  Faults& faults_;
  static constexpr BlockVisit nowhere{-1, -1};
  BlockVisit at_ = nowhere;
  const Op* op_ = nullptr;  // of the block at at_
  std::vector<bool> live_;
  std::optional<SectionStates> states_;                  // of a program whose ops name buffers that exist
  std::array<ByteRanges, num_sections> taken_, mapped_;  // by buffers that are alive; by maps
  WrittenBytes written_;
  ConflictMap conflicts_;
  std::array<Clock, num_streams> clocks_{};
  std::vector<Clock> recorded_;  // by event; -1: not yet
  std::int32_t sequence_ = 0;
};

/// One collective as its group must agree on it: where, what and how many bytes.
struct Said {
  std::size_t phase;
  std::string_view block;
  StreamId stream;
  OpKind kind;
  std::int64_t bytes;
  friend bool operator==(const Said&, const Said&) = default;
};

/// What a rank says to each group family, per phase, block and stream in order.
std::vector<std::vector<Said>> conversations(const Plan& plan, const Program& program) {
  std::vector<std::vector<Said>> out(plan.groups.size());
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      for (const Op& op : block.ops)
        if (is_communication(op.kind) && op.kind != OpKind::peer_copy && op.group >= 0)
          out[static_cast<std::size_t>(op.group)].push_back(
              {p, block.name, op.stream, op.kind, op.inputs.empty() ? 0 : op.inputs[0].capacity_bytes()});
  const auto place = [](const Said& s) { return std::tuple(s.phase, s.block, s.stream); };
  for (auto& said : out) std::ranges::stable_sort(said, {}, place);
  return out;
}

void check_conversations(const Plan& plan, Faults& faults) {
  std::vector<std::vector<std::vector<Said>>> said;  // of each program, to each family
  said.reserve(plan.programs.size());
  for (const Program& program : plan.programs) said.push_back(conversations(plan, program));
  const auto of = [&](Rank r) { return static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)]); };
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups) {
      std::set<std::size_t> seen;
      for (Rank r : members)
        if (seen.insert(of(r)).second && said[of(r)][f] != said[of(members[0])][f])
          faults.add(fmt::format("group {}: ranks {} and {} do not issue the same collectives in the same order",
                                 plan.groups[f].name, members[0], r));
    }
}

}  // namespace

std::vector<std::string> verify(const Plan& plan, std::size_t limit) {
  Faults faults(limit);
  for (std::int32_t p : plan.program_of_rank)
    if (p < 0 || static_cast<std::size_t>(p) >= plan.programs.size())
      faults.add(fmt::format("a rank names program {}", p));
  if (faults.full()) return faults.take();
  std::vector<Faults> of_program(plan.programs.size(), Faults(limit));
  in_parallel(plan.programs.size(), [&](std::size_t i) { ProgramCheck(plan, i, of_program[i]).run(); });
  for (Faults& found : of_program)
    for (std::string& line : found.take()) faults.add(std::move(line));
  auto found = faults.take();
  if (!found.empty()) return found;
  Faults conversations(limit);
  check_conversations(plan, conversations);
  return conversations.take();
}

}  // namespace hotbunk
