// A program as dense arrays: what the engine needs of an op in its hot loop, by a number.
//
// Op by op every op of a call has a number of its own. Call by call, ops of one call that follow one another on a
// stream, with no event between them, and that occupy the same thing, are one item: a segment of the call's body. What
// meets other ranks stays alone. The engine is none the wiser: what it plays has fewer and longer pieces.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "graph/bound.h"
#include "planner/cost/occupies.h"

namespace hotbunk {

/// How finely a rank is played.
enum class Granularity : std::uint8_t { ops, calls };

/// Which actual sizes an op's cost, bytes and FLOPs can depend on.
enum class DependsOn : std::uint8_t { nothing, shapes, pairs };

/// Ops of a body that run as one, in all calls where the events allow it.
struct Segment {
  std::int32_t body = 0;
  std::vector<std::int32_t> ops;  // of the body, ascending
  DependsOn depends_on = DependsOn::nothing;
};

/// Collectives of one group with kernels between them, all on one stream and nothing else beside them: who has met in
/// the first goes through all of it in step, so it is one longer meeting. Of ranks that are not alike it takes as long
/// as it does on the slowest.
struct Chain {
  struct Link {
    std::uint32_t item;
    std::int64_t times;
  };
  std::vector<Link> links;  // items of the same segment together
};

/// What the engine calls an op: one op, the segment of a call, or a chain.
struct OpInfo {
  BoundOp op;  // of several the first
  Occupies occupies = Occupies::stream;
  DependsOn depends_on = DependsOn::nothing;
  std::int32_t block = 0;     // within its phase
  std::int32_t segment = -1;  // -1: op by op, or a chain
  std::int32_t chain = -1;    // -1: none
};

/// One thing that a block enqueues, call by call.
struct BlockItem {
  enum class Kind : std::uint8_t { op, record, wait, call_begins, call_ends };
  Kind kind = Kind::op;
  StreamId stream = lead_stream;
  std::uint32_t number = 0;  // op: its own; record, wait: the event; else: the call within the block
};

class ProgramIndex {
 public:
  ProgramIndex(const Plan&, const Program&, Granularity = Granularity::ops);
  const Program& program() const { return *program_; }
  Granularity granularity() const { return granularity_; }
  const OpInfo& operator[](std::uint32_t op) const { return ops_[op]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(ops_.size()); }

  /// Op by op: the number of the first op of a call of this phase, and its block's within the phase.
  struct Place {
    std::uint32_t op;
    std::int32_t block;
  };
  Place find_call(const BoundOp&, std::int16_t phase) const;

  /// Call by call: all that a block enqueues, in order.
  std::span<const BlockItem> items(std::int16_t phase, std::int32_t block) const {
    return items_[static_cast<std::size_t>(phase)][static_cast<std::size_t>(block)];
  }
  /// The same with chains, and without the calls' beginnings and ends.
  std::span<const BlockItem> chained_items(std::int16_t phase, std::int32_t block) const {
    return chained_[static_cast<std::size_t>(phase)][static_cast<std::size_t>(block)];
  }
  const Chain& chain(const OpInfo& item) const { return chains_[static_cast<std::size_t>(item.chain)]; }
  /// How many ops or items a block has that can take time.
  std::int64_t num_ops(std::int16_t phase, std::int32_t block) const {
    return num_ops_[static_cast<std::size_t>(phase)][static_cast<std::size_t>(block)];
  }
  std::span<const Segment> segments() const { return segments_; }
  /// The ops of an item, whose `op` is one of this index.
  template <class Visit>
  void each_op(const OpInfo& item, Visit&& visit) const {
    if (item.segment < 0) return visit(item.op);
    BoundOp op = item.op;
    const std::vector<Op>& ops = op.body().ops;
    for (const std::int32_t i : segments_[static_cast<std::size_t>(item.segment)].ops) {
      op.op = &ops[static_cast<std::size_t>(i)];
      visit(op);
    }
  }

 private:
  class Cut;
  const Program* program_;
  Granularity granularity_;
  std::vector<OpInfo> ops_;
  std::vector<std::vector<std::int64_t>> num_ops_;
  std::vector<Segment> segments_;
  std::vector<std::vector<std::vector<std::uint32_t>>> first_;  // op by op: [phase][block][call]
  std::vector<Chain> chains_;
  std::vector<std::vector<std::vector<BlockItem>>> items_, chained_;  // call by call: [phase][block]
};

}  // namespace hotbunk
