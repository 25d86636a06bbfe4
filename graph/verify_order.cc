// Why streams wait: every slot limit is kept, and no stream waits for what is nothing to it.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "graph/clock.h"
#include "graph/print.h"
#include "graph/true_order.h"
#include "graph/verify_parts.h"

namespace hotbunk {
namespace {

/// One block by itself: its borders are joined, and transients are mapped there. `any_order`: what stands before and
/// behind it is the Driver's choice, so that the borders join all streams, whatever they touch.
class BlockOrder {
 public:
  BlockOrder(const Program& program, const Block& block, bool any_order, Faults& faults, std::string place)
      : program_(program),
        block_(block),
        any_order_(any_order),
        faults_(faults),
        place_(std::move(place)),
        order_(program.buffers.size() + num_locals(program, block), program.slot_limits) {
    known_.fill(before_all), waits_.fill({});
    begun_[at(lead_stream)] = true;
  }

  void run() {
    first_local_ = static_cast<BufferId>(program_.buffers.size());
    for (const Call& call : block_.calls) {
      each_step(
          program_, block_, call, [&](const BoundOp& op) { visit(op); }, [&](const Mark& m) { visit(m); });
      first_local_ += static_cast<BufferId>(program_.bodies[static_cast<std::size_t>(call.body)].locals.size());
    }
    if (any_order_) check_end();
  }

 private:
  struct Event {
    StreamId stream{};
    Clock known = before_all;
    bool begun = false;  // the stream, then
  };
  /// What a stream waited for since its last op: the ops that the events stand behind. What nothing follows joins the
  /// block's border.
  using Waits = std::vector<std::int32_t>;

  static std::size_t num_locals(const Program& program, const Block& block) {
    std::size_t n = 0;
    for (const Call& call : block.calls) n += program.bodies[static_cast<std::size_t>(call.body)].locals.size();
    return n;
  }

  void visit(const BoundOp& op) {
    if (faults_.full() || op->kind == OpKind::alloc || op->kind == OpKind::free) return;
    if (op->section == transient_section && (op->kind == OpKind::map || op->kind == OpKind::unmap)) return;
    const auto i = static_cast<std::int32_t>(ops_.size());
    ops_.push_back(op);
    known_[at(op->stream)][at(op->stream)] = i;
    if (any_order_ && !begun_[at(op->stream)])
      fault(i, "its stream does not wait for what came before the block, which may be any other of the phase");
    follow(i);
  }
  void visit(const Mark& m) {
    Clock& mine = known_[at(m.stream)];
    if (m.kind == OpKind::record) recorded_[m.event] = {m.stream, mine, begun_[at(m.stream)]};
    else wait(m, mine);
  }

  std::string named(std::int32_t i) const {
    const BoundOp& op = ops_[static_cast<std::size_t>(i)];
    return fmt::format("{} '{}'", name_of(op->kind), label_of(op));
  }
  void fault(std::int32_t i, const std::string& text) {
    const BoundOp& op = ops_[static_cast<std::size_t>(i)];
    faults_.add(fmt::format("{}, {}: {}", place_, where_in_block(op), text));
  }

  void wait(const Mark& m, Clock& mine) {
    const auto found = recorded_.find(m.event);
    if (found == recorded_.end()) return;  // a fault of its own (verify_walks.cc)
    const auto& [stream, known, begun] = found->second;
    if (begun) begun_[at(m.stream)] = true;
    // An event that no op of the block stands before is a border's.
    if (known[at(stream)] >= 0) waits_[at(m.stream)].push_back(known[at(stream)]);
    merge(mine, known);
  }

  void check_end() {
    for (std::size_t s = 0; s < known_.size(); ++s)
      if (const std::int32_t last = known_[s][s]; last >= 0 && known_[at(lead_stream)][s] < last)
        fault(last, "the block ends without waiting for it, and any other of the phase may follow");
  }

  void follow(std::int32_t i) {
    const BoundOp& op = ops_[static_cast<std::size_t>(i)];
    const StreamId stream = op->stream;
    Waits& waits = waits_[at(stream)];
    const auto needed = [&](std::int32_t earlier) { std::erase(waits, earlier); };
    order_.follow([&](auto&& visit) { each_access(op, first_local_, visit); }, stream, i,
                  [&](StreamId, std::int32_t earlier) { needed(earlier); },
                  [&](StreamId other, std::int32_t earlier, const SlotLimit& limit) {
                    if (known_[at(stream)][at(other)] < earlier)
                      fault(i, fmt::format("takes a slot of '{}', which has {}, without waiting for {}", limit.name,
                                           limit.slots, named(earlier)));
                    needed(earlier);
                  });
    for (const auto* side : {&op->inputs, &op->outputs})
      for (const Tensor& t : *side) {
        const BoundBuffer b = op.buffer(t);
        if (const SlotLimit* limit = b.is_local() ? nullptr : order_.lost_slot(b.id))
          fault(i, fmt::format("touches '{}' when its slot of '{}', which has {}, is taken again", b.name(),
                               limit->name, limit->slots));
      }
    for (std::int32_t w : waits)
      fault(i, fmt::format("false wait: shares no buffer with {}, and no slot limit asks for it", named(w)));
    waits.clear();
  }

  const Program& program_;
  const Block& block_;
  const bool any_order_;
  Faults& faults_;
  std::string place_;
  TrueOrder order_;
  std::array<bool, max_streams> begun_{};  // behind all that came before the block
  BufferId first_local_ = 0;               // of the call at hand
  std::vector<BoundOp> ops_;               // so far, those that have an order
  std::array<Clock, max_streams> known_;
  std::array<Waits, max_streams> waits_;  // since the stream's last op
  std::map<EventId, Event> recorded_;
};

}  // namespace

void check_waits(const Plan& plan, std::size_t index, Faults& faults) {
  const Program& program = plan.programs[index];
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      BlockOrder(program, block, plan.phases[p].driven, faults,
                 fmt::format("program {}: phase {}, block {}", index, plan.phases[p].name, block.name))
          .run();
}

}  // namespace hotbunk
