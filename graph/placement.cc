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
  explicit Placement(Program& program)
      : buffers_(program.buffers),
        uses_(buffers_.size()),
        recorded_(static_cast<std::size_t>(program.num_events), before_all) {}

  void run(const Block& block) {
    ranges_.settle();
    note_uses(block);
    for (const Op& op : block.ops)
      if (op.kind == OpKind::alloc) take(op.buffer);
      else if (op.kind == OpKind::free) give(op.buffer);
    for (BufferId id : used_) use(id) = {};
  }

  std::int64_t high_bytes() const { return high_; }

 private:
  /// Of one buffer in the block at hand.
  struct Use {
    Clock entry = clock_of(std::numeric_limits<std::int32_t>::max());  // what all who touch it know when they first do
    Clock last = before_all;                                           // its last uses
  };
  Use& use(BufferId id) { return uses_[static_cast<std::size_t>(id)]; }

  void note_uses(const Block& block) {
    std::array<Clock, num_streams> known;
    known.fill(before_all);  // and all blocks before, for borders are joined
    used_.clear();
    for (std::size_t i = 0; i < block.ops.size(); ++i) {
      const Op& op = block.ops[i];
      Clock& mine = known[at(op.stream)];
      if (op.kind == OpKind::record) recorded_[static_cast<std::size_t>(op.event)] = mine;
      else if (op.kind == OpKind::wait) merge(mine, recorded_[static_cast<std::size_t>(op.event)]);
      if (op.inputs.empty() && op.outputs.empty()) continue;
      mine[at(op.stream)] = static_cast<std::int32_t>(i);
      for (const auto* side : {&op.inputs, &op.outputs})
        for (const Tensor& t : *side) note_use(t.buffer, op.stream, mine);
    }
  }

  void note_use(BufferId id, StreamId stream, const Clock& known) {
    Use& u = use(id);
    if (u.last == before_all) used_.push_back(id);
    if (u.last[at(stream)] < 0)  // what follows on the stream knows no less
      for (std::size_t s = 0; s < known.size(); ++s) u.entry[s] = std::min(u.entry[s], known[s]);
    u.last[at(stream)] = known[at(stream)];
  }

  void take(BufferId id) {
    Buffer& b = buffers_[static_cast<std::size_t>(id)];
    if (b.section != Section::transient || b.bytes() == 0) return;
    const std::int64_t bytes = aligned(b.bytes(), alignment);
    b.offset = ranges_.take(bytes, use(id).entry);
    high_ = std::max(high_, b.offset + bytes);
  }

  void give(BufferId id) {
    const Buffer& b = buffers_[static_cast<std::size_t>(id)];
    if (b.section != Section::transient || b.bytes() == 0) return;
    ranges_.give(b.offset, aligned(b.bytes(), alignment), use(id).last);
  }

  std::vector<Buffer>& buffers_;
  std::vector<Use> uses_;       // [buffer]
  std::vector<BufferId> used_;  // in the block at hand
  std::vector<Clock> recorded_;
  OrderedRanges ranges_;
  std::int64_t high_ = 0;
};

}  // namespace

void lay_out_sections(const Plan& plan, Program& program) {
  program.section_bytes.fill(0);
  for (Buffer& b : program.buffers) {
    if (b.section == Section::transient) continue;
    std::int64_t& end = program.section_bytes[static_cast<std::size_t>(b.section)];
    b.offset = end;
    end = aligned(end + b.bytes(), alignment);
  }
  for (std::int64_t& bytes : program.section_bytes) bytes = aligned(bytes, plan.chunk_bytes);
}

void place_transients(const Plan& plan, Program& program) {
  Placement placement(program);
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks) placement.run(block);
  program.section_bytes[static_cast<std::size_t>(Section::transient)] =
      aligned(placement.high_bytes(), plan.chunk_bytes);
}

std::int64_t transient_high_water(const Program& program, std::int16_t phase) {
  std::int64_t high = 0;
  for (const Block& block : program.phases[static_cast<std::size_t>(phase)])
    for (const Op& op : block.ops)
      if (op.kind == OpKind::alloc) {
        const Buffer& b = program.buffers[static_cast<std::size_t>(op.buffer)];
        if (b.section == Section::transient) high = std::max(high, b.offset + b.bytes());
      }
  return high;
}

}  // namespace hotbunk
