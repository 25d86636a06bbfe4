// lay_out_sections and place_transients: where buffers lie. A range of the transient section passes to another stream
// only where the order of the program already implies it: no wait is there for an address.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "graph/bound.h"
#include "graph/clock.h"
#include "graph/ordered_ranges.h"
#include "graph/passes.h"

namespace hotbunk {
namespace {

constexpr std::int64_t alignment = 64;  // a cache line; oneDNN and AVX-512 loads want it

std::int64_t aligned(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

/// Places what one block after another allocates: the program's transients, and each call's locals.
class Placement {
 public:
  explicit Placement(Program& program)
      : program_(program), recorded_(static_cast<std::size_t>(program.num_events), before_all) {}

  void run(Block& block) {
    ranges_.settle();
    uses_.assign(program_.buffers.size(), {});
    for (const Call& call : block.calls) uses_.resize(uses_.size() + call.locals.size());
    note_uses(block);
    first_local_ = program_.buffers.size();
    for (Call& call : block.calls) {
      const Body& body = program_.bodies[static_cast<std::size_t>(call.body)];
      for (const Op& op : body.ops)
        if (op.kind == OpKind::alloc || op.kind == OpKind::free) place(op.kind, call, body, op.buffer);
      first_local_ += call.locals.size();
    }
  }

  std::int64_t high_bytes() const { return high_; }

 private:
  /// Of a buffer or local in the block at hand.
  struct Use {
    Clock entry = clock_of(std::numeric_limits<std::int32_t>::max());  // what all who touch it know when they first do
    Clock last = before_all;                                           // its last uses
    void note(StreamId stream, const Clock& known) {
      if (last[at(stream)] < 0)  // what follows on the stream knows no less
        for (std::size_t s = 0; s < known.size(); ++s) entry[s] = std::min(entry[s], known[s]);
      last[at(stream)] = known[at(stream)];
    }
  };
  void note_uses(const Block& block) {
    std::array<Clock, num_streams> known;
    known.fill(before_all);  // and all blocks before, for borders are joined
    std::int32_t i = 0;
    first_local_ = program_.buffers.size();
    for (const Call& call : block.calls) {
      const auto on_op = [&](const BoundOp& op) {
        ++i;
        if (op->inputs.empty() && op->outputs.empty()) return;
        Clock& mine = known[at(op->stream)];
        mine[at(op->stream)] = i;
        for (const auto* side : {&op->inputs, &op->outputs})
          for (const Tensor& t : *side) use_of(call, op.body(), t.buffer).note(op->stream, mine);
      };
      each_step(program_, block, call, on_op, [&](const Mark& m) {
        Clock& mine = known[at(m.stream)];
        if (m.kind == OpKind::record) recorded_[static_cast<std::size_t>(m.event)] = mine;
        else merge(mine, recorded_[static_cast<std::size_t>(m.event)]);
      });
      first_local_ += call.locals.size();
    }
  }

  Use& use_of(const Call& call, const Body& body, BufferId slot) {
    const auto i = static_cast<std::size_t>(slot);
    return slot < body.num_ports ? uses_[static_cast<std::size_t>(call.ports[i].buffer)]
                                 : uses_[first_local_ + i - static_cast<std::size_t>(body.num_ports)];
  }

  void place(OpKind kind, Call& call, const Body& body, BufferId slot) {
    const bool port = slot < body.num_ports;
    const auto i = static_cast<std::size_t>(port ? slot : slot - body.num_ports);
    Buffer* const bound = port ? &program_.buffers[static_cast<std::size_t>(call.ports[i].buffer)] : nullptr;
    const Buffer& b = port ? *bound : body.locals[i];
    if (b.section != Section::transient || b.bytes() == 0) return;
    const std::int64_t bytes = aligned(b.bytes(), alignment);
    std::int64_t& offset = port ? bound->offset : call.locals[i];
    const Use& use = use_of(call, body, slot);
    if (kind == OpKind::free) return ranges_.give(offset, bytes, use.last);
    offset = ranges_.take(bytes, use.entry);
    high_ = std::max(high_, offset + bytes);
  }

  Program& program_;
  std::vector<Use> uses_;        // of buffers, and behind them of the block's locals, call by call
  std::size_t first_local_ = 0;  // of the call at hand
  std::vector<Clock> recorded_;
  OrderedRanges ranges_;
  std::int64_t high_ = 0;
};

}  // namespace

void lay_out_sections(const Plan& plan, Draft& draft) {
  draft.section_bytes.fill(0);
  for (Buffer& b : draft.buffers) {
    if (b.section == Section::transient) continue;
    std::int64_t& end = draft.section_bytes[static_cast<std::size_t>(b.section)];
    b.offset = end;
    end = aligned(end + b.bytes(), alignment);
  }
  for (std::int64_t& bytes : draft.section_bytes) bytes = aligned(bytes, plan.chunk_bytes);
}

void place_transients(const Plan& plan, Program& program) {
  Placement placement(program);
  for (auto& blocks : program.phases)
    for (Block& block : blocks) placement.run(block);
  program.section_bytes[static_cast<std::size_t>(Section::transient)] =
      aligned(placement.high_bytes(), plan.chunk_bytes);
}

std::int64_t transient_high_water(const Program& program, std::int16_t phase) {
  std::int64_t high = 0;
  for (const Block& block : program.phases[static_cast<std::size_t>(phase)])
    each_op(program, block, [&](const BoundOp& op) {
      if (op->kind != OpKind::alloc) return;
      const BoundBuffer b = op.allocated();
      if (b.section() == Section::transient) high = std::max(high, b.offset + b.bytes());
    });
  return high;
}

}  // namespace hotbunk
