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

/// Places what one block after another allocates: frames, and the program's transients.
class Placement {
 public:
  explicit Placement(Program& program)
      : program_(program), recorded_(static_cast<std::size_t>(program.num_events), before_all) {}

  void run(Block& block) {
    ranges_.settle();
    buffers_.assign(program_.buffers.size(), {}), frames_.assign(block.calls.size(), {});
    note_uses(block);
    for (std::size_t c = 0; c < block.calls.size(); ++c) {
      Call& call = block.calls[c];
      const std::int64_t frame = aligned(body_of(call).frame_bytes, alignment);
      if (frame > 0) high_ = std::max(high_, (call.frame = ranges_.take(frame, frames_[c].entry)) + frame);
      for (const Op& op : body_of(call).ops) {
        const bool port = (op.kind == OpKind::alloc || op.kind == OpKind::free) && op.buffer < body_of(call).num_ports;
        if (!port) continue;
        const BufferId id = call.ports[static_cast<std::size_t>(op.buffer)].buffer;
        if (op.kind == OpKind::alloc) take(id);
        else give(id);
      }
      if (frame > 0) ranges_.give(call.frame, frame, frames_[c].last);
    }
  }

  std::int64_t high_bytes() const { return high_; }

 private:
  /// Of a buffer or a frame in the block at hand.
  struct Use {
    Clock entry = clock_of(std::numeric_limits<std::int32_t>::max());  // what all who touch it know when they first do
    Clock last = before_all;                                           // its last uses
    void note(StreamId stream, const Clock& known) {
      if (last[at(stream)] < 0)  // what follows on the stream knows no less
        for (std::size_t s = 0; s < known.size(); ++s) entry[s] = std::min(entry[s], known[s]);
      last[at(stream)] = known[at(stream)];
    }
  };
  const Body& body_of(const Call& call) const { return program_.bodies[static_cast<std::size_t>(call.body)]; }

  void note_uses(const Block& block) {
    std::array<Clock, num_streams> known;
    known.fill(before_all);  // and all blocks before, for borders are joined
    std::int32_t i = 0;
    each_step(
        program_, block,
        [&](const BoundOp& op) {
          ++i;
          if (op->inputs.empty() && op->outputs.empty()) return;
          Clock& mine = known[at(op->stream)];
          mine[at(op->stream)] = i;
          for (const auto* side : {&op->inputs, &op->outputs})
            for (const Tensor& t : *side) {
              const BoundBuffer b = op.buffer(t);
              Use& use = b.is_local() ? frames_[static_cast<std::size_t>(op.call - block.calls.data())]
                                      : buffers_[static_cast<std::size_t>(b.id)];
              use.note(op->stream, mine);
            }
        },
        [&](const Mark& m) {
          Clock& mine = known[at(m.stream)];
          if (m.kind == OpKind::record) recorded_[static_cast<std::size_t>(m.event)] = mine;
          else merge(mine, recorded_[static_cast<std::size_t>(m.event)]);
        });
  }

  void take(BufferId id) {
    Buffer& b = program_.buffers[static_cast<std::size_t>(id)];
    if (b.section != Section::transient || b.bytes() == 0) return;
    const std::int64_t bytes = aligned(b.bytes(), alignment);
    b.offset = ranges_.take(bytes, buffers_[static_cast<std::size_t>(id)].entry);
    high_ = std::max(high_, b.offset + bytes);
  }

  void give(BufferId id) {
    const Buffer& b = program_.buffers[static_cast<std::size_t>(id)];
    if (b.section != Section::transient || b.bytes() == 0) return;
    ranges_.give(b.offset, aligned(b.bytes(), alignment), buffers_[static_cast<std::size_t>(id)].last);
  }

  Program& program_;
  std::vector<Use> buffers_;  // [buffer]
  std::vector<Use> frames_;   // [call]
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
