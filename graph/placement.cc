// lay_out_sections and place_transients: where buffers lie. A range of the transient section passes to another stream
// only where the order of the program already implies it: no wait is there for an address.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "graph/clock.h"
#include "graph/ordered_ranges.h"
#include "graph/passes.h"

namespace hotbunk {
namespace {

constexpr std::int64_t alignment = 64;  // a cache line; oneDNN and AVX-512 loads want it

std::int64_t aligned(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

/// Places what one block after another allocates.
class Placement {
 public:
  explicit Placement(Draft& draft) : draft_(draft), recorded_(static_cast<std::size_t>(draft.num_events), before_all) {}

  /// Gives what the phase's blocks keep for one another its place, so that no block of it uses that for anything else.
  /// How much of the section that takes.
  std::int64_t begin(const std::vector<DraftBlock>& blocks) {
    std::int64_t high = 0;
    if (draft_.kept.empty()) return high;
    is_kept_.assign(draft_.buffers.size(), false);
    for (const BufferId id : draft_.kept) is_kept_[static_cast<std::size_t>(id)] = true;
    std::vector<bool> used(draft_.buffers.size(), false);
    for (const DraftBlock& block : blocks)
      for (const DraftCall& call : block.calls)
        for (const Port& slot : call.slots) used[static_cast<std::size_t>(slot.buffer)] = true;
    ranges_.settle();
    for (const BufferId id : draft_.kept) {
      Buffer& b = buffer(id);
      if (!used[static_cast<std::size_t>(id)] || b.bytes() == 0) continue;
      b.offset = ranges_.take(aligned(b.bytes(), alignment), Use{}.entry);
      high = std::max(high, b.offset + b.bytes());
      held_.push_back(id);
    }
    high_ = std::max(high_, aligned(high, alignment));
    return high;
  }
  void end() {
    for (const BufferId id : held_) ranges_.give(buffer(id).offset, aligned(buffer(id).bytes(), alignment), before_all);
    held_.clear();
  }

  /// How much of the section the block needs.
  std::int64_t run(const DraftBlock& block) {
    ranges_.settle();
    uses_.clear();
    use_of_.assign(draft_.buffers.size(), -1);
    note_uses(block);
    note_steps(block);
    std::int64_t high = 0;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (i % joined_every == 0) ranges_.join(known_later_[i / joined_every]);
      const auto [kind, id] = steps_[i];
      place(kind, id);
      if (kind == OpKind::alloc) high = std::max(high, buffer(id).offset + buffer(id).bytes());
    }
    return high;
  }

  std::int64_t high_bytes() const { return high_; }

 private:
  /// Of a buffer in the block at hand.
  struct Use {
    Clock entry = clock_of(std::numeric_limits<std::int32_t>::max());  // what all who touch it know when they first do
    Clock last = before_all;                                           // its last uses
    void note(StreamId stream, const Clock& known) {
      if (last[at(stream)] < 0)  // what follows on the stream knows no less
        for (std::size_t s = 0; s < known.size(); ++s) entry[s] = std::min(entry[s], known[s]);
      last[at(stream)] = known[at(stream)];
    }
  };
  Buffer& buffer(BufferId id) { return draft_.buffers[static_cast<std::size_t>(id)]; }

  void note_uses(const DraftBlock& block) {
    std::array<Clock, max_streams> known;
    known.fill(before_all);  // and all blocks before, for borders are joined
    std::int32_t first_op = 0;
    for (const DraftCall& call : block.calls) {
      const DraftBody& body = draft_.body_of(call);
      auto mark = call.marks.begin();
      auto memory = call.memory.begin();
      std::int32_t steps = 0;  // allocs and frees in front of the op at hand
      for (const DraftBody::Touch& touch : body.touches) {
        if (mark != call.marks.end()) {
          for (; memory != call.memory.end() && stands_before(*memory, touch.op); ++memory) ++steps;
          for (; mark != call.marks.end() && mark->before <= touch.op + steps; ++mark) follow(*mark, known);
        }
        const StreamId stream = body.ops[static_cast<std::size_t>(touch.op)].stream;
        Clock& mine = known[at(stream)];
        mine[at(stream)] = first_op + touch.op;
        note_use(call.slots[static_cast<std::size_t>(touch.slot)].buffer, stream, mine);
      }
      for (; mark != call.marks.end(); ++mark) follow(*mark, known);
      first_op += static_cast<std::int32_t>(body.ops.size());
    }
  }
  void note_use(BufferId id, StreamId stream, const Clock& known) {
    if (buffer(id).section != transient_section) return;  // it has its place
    std::int32_t& use = use_of_[static_cast<std::size_t>(id)];
    if (use < 0) use = static_cast<std::int32_t>(uses_.size()), uses_.emplace_back();
    uses_[static_cast<std::size_t>(use)].note(stream, known);
  }
  static bool stands_before(const DraftMemory& m, std::int32_t op) {
    return m.op < op || (m.op == op && m.kind == OpKind::alloc);
  }
  void follow(const Mark& m, std::array<Clock, max_streams>& known) {
    Clock& mine = known[at(m.stream)];
    if (m.kind == OpKind::record) recorded_[static_cast<std::size_t>(m.event)] = mine;
    else merge(mine, recorded_[static_cast<std::size_t>(m.event)]);
  }

  /// The allocs and frees of the block, and what all that ask from one on know.
  void note_steps(const DraftBlock& block) {
    steps_.clear();
    for (const DraftCall& call : block.calls) {
      const auto note = [&](OpKind kind, BufferId slot) {
        const BufferId id = call.slots[static_cast<std::size_t>(slot)].buffer;
        if (buffer(id).section == transient_section && buffer(id).bytes() > 0) steps_.emplace_back(kind, id);
      };
      each_step(
          draft_.body_of(call), call, [&](const DraftMemory& m, StreamId) { note(m.kind, m.slot); },
          [&](const Op& op, std::size_t) {
            if (op.kind == OpKind::alloc || op.kind == OpKind::free) note(op.kind, op.buffer);
          });
    }
    known_later_.resize((steps_.size() + joined_every - 1) / joined_every);
    Clock known = Use{}.entry;
    for (std::size_t i = steps_.size(); i-- > 0;) {
      if (const auto [kind, id] = steps_[i]; kind == OpKind::alloc && !is_kept(id))
        for (std::size_t s = 0; s < known.size(); ++s) known[s] = std::min(known[s], use_of(id).entry[s]);
      if (i % joined_every == 0) known_later_[i / joined_every] = known;
    }
  }

  bool is_kept(BufferId id) const { return !is_kept_.empty() && is_kept_[static_cast<std::size_t>(id)]; }
  const Use& use_of(BufferId id) const {
    static constexpr Use none{};
    const std::int32_t use = use_of_[static_cast<std::size_t>(id)];
    return use < 0 ? none : uses_[static_cast<std::size_t>(use)];
  }

  /// A transient buffer of a size.
  void place(OpKind kind, BufferId id) {
    if (is_kept(id)) return;
    Buffer& b = buffer(id);
    const std::int64_t bytes = aligned(b.bytes(), alignment);
    if (kind == OpKind::free) {
      ranges_.give(b.offset, bytes, use_of(id).last);
    } else {
      b.offset = ranges_.take(bytes, use_of(id).entry);
      high_ = std::max(high_, b.offset + bytes);
    }
  }

  static constexpr std::size_t joined_every = 8;  // steps; a look at all ranges costs about what a take does

  Draft& draft_;
  std::vector<Use> uses_;                           // of transients in the block at hand
  std::vector<std::int32_t> use_of_;                // [buffer] -> index into uses_; -1: the block does not touch it
  std::vector<std::pair<OpKind, BufferId>> steps_;  // allocs and frees of that block, in order
  std::vector<Clock> known_later_;                  // [step / joined_every]: by all that ask from there on
  std::vector<Clock> recorded_;
  std::vector<bool> is_kept_;   // [buffer]; empty: none is
  std::vector<BufferId> held_;  // of the phase at hand
  OrderedRanges ranges_;
  std::int64_t high_ = 0;
};

}  // namespace

void lay_out_sections(const Plan& plan, Draft& draft) {
  for (Section& section : draft.sections) section.bytes = 0;
  for (Buffer& b : draft.buffers) {
    if (b.section == transient_section) continue;
    std::int64_t& end = draft.section(b.section).bytes;
    b.offset = end;
    end = aligned(end + b.bytes(), alignment);
  }
  for (Section& section : draft.sections) section.bytes = aligned(section.bytes, plan.chunk_bytes);
}

void place_transients(const Plan& plan, Draft& draft) {
  Placement placement(draft);
  draft.transient_bytes.clear();
  for (const auto& blocks : draft.phases) {
    std::int64_t& most = draft.transient_bytes.emplace_back(placement.begin(blocks));
    for (const DraftBlock& block : blocks) most = std::max(most, placement.run(block));
    placement.end();
  }
  draft.section(transient_section).bytes = aligned(placement.high_bytes(), plan.chunk_bytes);
}

}  // namespace hotbunk
