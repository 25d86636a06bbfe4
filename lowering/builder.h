// ProgramBuilder: what the lowering writes a program with. Buffers by name, ops in order; lifetimes, offsets and
// events are passes of graph/ that run afterwards.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "graph/draft.h"
#include "graph/slots.h"

namespace hotbunk {

/// The group families of a colocated plan; indices into Plan::groups.
enum class Family : GroupId { fsdp = 0, tp = 1, world = 2 };

inline Dim fixed(std::int64_t size) { return {size, Sym::fixed, 0}; }
inline Dim tokens(std::int64_t capacity, std::int64_t begin = 0) { return {capacity, Sym::tokens, begin}; }
inline Dim seqs(std::int64_t capacity) { return {capacity, Sym::seqs, 0}; }

using SlotLimitId = std::size_t;  // index into Draft::slot_limits

class ProgramBuilder {
 public:
  explicit ProgramBuilder(const std::vector<PhaseInfo>& phases) : phases_(phases) {
    draft_.phases.resize(phases.size());
  }

  /// A buffer that the lowering allocates and frees itself (weights, optimizer state, gradients, the KV pool).
  BufferId managed(std::string name, DType, std::int64_t elements, Category, Section);
  /// A buffer that lives from its first to its last use inside a block.
  BufferId transient(std::string name, DType, std::int64_t elements, Category);
  /// The same, with the tensor that covers it.
  Tensor transient(std::string name, DType, std::initializer_list<Dim> shape, Category);

  /// Declares that of the turns to come, `slots` at most are in use at once (graph/plan.h).
  SlotLimitId limit_slots(std::string name, std::int64_t slots);
  /// The next turn is that of these buffers; those that are no transients are there anyway.
  void take_turn(SlotLimitId, std::initializer_list<BufferId>);

  /// A window into a buffer, from `element` on (in elements of the window's dtype).
  Tensor view(BufferId, DType, std::initializer_list<Dim> shape, std::int64_t element = 0) const;
  Tensor whole(BufferId) const;
  const Buffer& buffer(BufferId id) const { return draft_.buffers[static_cast<std::size_t>(id)]; }

  /// Ops from now on go to this phase's new block, to a call that is known by both.
  void begin_block(std::int32_t phase, std::string name);
  /// The same; the block puts the section to sleep or wakes it, and is skipped where that has happened already.
  void begin_transition(std::int32_t phase, std::string name, Enters, Section);

  /// Ops from now on are a call of their own, until the next begin_call or begin_block. `body` says what it does; the
  /// names of its ops, and of the transients that are its own, begin with `name`.
  void begin_call(std::string body, std::string name);

  Op& emit(OpKind, StreamId, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs);
  Op& communicate(OpKind, StreamId, Family, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs);
  void alloc(BufferId, StreamId = StreamId::compute);
  void free(BufferId, StreamId = StreamId::compute);
  /// The whole section; its extent is filled in when offsets are known.
  void map(Section, StreamId = StreamId::compute);
  void unmap(Section, StreamId = StreamId::compute);
  Op& feed(const Tensor&, Slot);
  Op& fetch(const Tensor&, Slot);

  Draft& draft() { return draft_; }

 private:
  Op& push(OpKind, StreamId);

  const std::vector<PhaseInfo>& phases_;
  Draft draft_;
  DraftBlock* block_ = nullptr;
};

/// Adds one attribute; chains.
Op& with(Op&, Attr, std::int64_t);
Op& with(Op&, Attr, double);

/// Marks a whole-section map or unmap until finish() knows the extent.
inline constexpr std::int64_t whole_section = -1;

/// Runs the passes: lifetimes, section extents, dependencies, bodies and calls, offsets, mapping of the transient
/// section. `keep_mapped`: nothing sleeps, so transients are mapped once for the largest need.
Program finish(const Plan&, Draft, bool keep_mapped);

}  // namespace hotbunk
