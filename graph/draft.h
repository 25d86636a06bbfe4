// A program as it is written: bodies, and in each block the calls of them, over buffers of the program. The passes
// (passes.h) say when buffers live and what waits for what, call by call; that makes a Program of it.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// A piece of work as the lowering writes it. Where its ops say `buffer` they mean a slot, which each call binds.
struct DraftBody {
  /// What the ops do with a slot.
  struct Slot {
    std::int32_t first = -1, last = -1;  // the ops that read or write it; -1: none
    std::int64_t least_offset = 0;       // of its tensors, in bytes
    std::uint32_t streams = 0;           // one bit for each that reads or writes it
    bool by_hand = false;                // an op allocates or frees it
    bool shown = false;                  // peers read it: they know it by its name
  };

  /// The first or the last op of a stream that reads or writes a slot.
  struct Touch {
    std::int32_t op = 0;
    BufferId slot = -1;
  };

  std::string name;                              // "train.layer.forward"
  std::vector<Op> ops;                           // named without the call's name; no record and no wait
  std::vector<Slot> slots;                       // note_slots() says what is in them
  std::vector<Touch> touches;                    // the same by op
  bool maps = false;                             // an op maps or unmaps
  std::array<std::int32_t, max_streams> last{};  // the last op of each stream, but for allocs and frees; -1: none
  /// From the ops.
  void note_slots(std::size_t num_slots);
};

/// An alloc or free that insert_lifetimes adds: in front of an op of the body, or behind it.
struct DraftMemory {
  std::int32_t op = 0;
  OpKind kind = OpKind::alloc;
  BufferId slot = -1;
  friend bool operator==(const DraftMemory&, const DraftMemory&) = default;
};

struct DraftCall {
  std::int32_t body = 0;            // index into Draft::bodies
  std::string name;                 // what the names of its ops and locals begin with
  std::vector<Port> slots;          // what each is bound to
  std::vector<DraftMemory> memory;  // in the order in which they stand
  std::vector<Mark> marks;          // `before` counts the ops and `memory`
  /// Transients of a repeated call, from the first one on: until assemble() their names lack the call's.
  BufferId first_unnamed = 0;
  std::int32_t num_unnamed = 0;
};

struct DraftBlock {
  std::string name;
  std::vector<DraftCall> calls;
  Enters enters = Enters::nothing;
  SectionId section = transient_section;
};

struct Draft {
  std::vector<Buffer> buffers;
  std::vector<BufferId> transients;  // that live from their first to their last use in a block
  std::vector<BufferId> kept;        // of these: through several blocks of a phase, which a Driver plays in any order
  std::vector<SlotLimit> slot_limits;
  std::vector<DraftBody> bodies;
  std::vector<std::vector<DraftBlock>> phases;
  std::vector<Section> sections = {{"transient"}};
  std::vector<std::int64_t> transient_bytes;  // of each phase: how much of the transient section it needs
  std::int32_t num_events = 0;

  Section& section(SectionId id) { return sections[static_cast<std::size_t>(id)]; }
  const DraftBody& body_of(const DraftCall& c) const { return bodies[static_cast<std::size_t>(c.body)]; }
};

/// The call of ops that name buffers, its body added to the draft. Its slots are `inputs`, counted from where each
/// begins, then all else that the ops name, in their order. Names of ops begin with the call's, or are empty.
DraftCall written_call(Draft&, std::string body, std::string name, std::vector<Op> ops,
                       std::span<const Port> inputs = {});

/// Calls on_memory(const DraftMemory&, StreamId) and on_op(const Op&, index) in the order of the call.
template <class OnMemory, class OnOp>
void each_step(const DraftBody& body, const DraftCall& call, OnMemory&& on_memory, OnOp&& on_op) {
  auto m = call.memory.begin();
  for (std::size_t i = 0; i < body.ops.size(); ++i) {
    const Op& op = body.ops[i];
    const auto here = [&] { return m != call.memory.end() && m->op == static_cast<std::int32_t>(i); };
    for (; here() && m->kind == OpKind::alloc; ++m) on_memory(*m, op.stream);
    on_op(op, i);
    for (; here(); ++m) on_memory(*m, op.stream);
  }
}

}  // namespace hotbunk
