// Why streams wait: every slot limit is kept, and no stream waits for what is nothing to it.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "graph/clock.h"
#include "graph/print.h"
#include "graph/true_order.h"
#include "graph/verify_walks.h"

namespace hotbunk {
namespace {

/// One block by itself: its borders are joined, and transients are mapped there.
class BlockOrder {
 public:
  BlockOrder(const Program& program, const Block& block, Faults& faults, std::string place)
      : program_(program), ops_(block.ops), faults_(faults), place_(std::move(place)), order_(program) {
    known_.fill(before_all), waits_.fill({});
  }

  void run() {
    for (std::size_t i = 0; i < ops_.size() && !faults_.full(); ++i) {
      const Op& op = ops_[i];
      Clock& mine = known_[at(op.stream)];
      switch (op.kind) {
        case OpKind::alloc:
        case OpKind::free:
          break;
        case OpKind::record:
          recorded_[op.event] = {op.stream, mine};
          break;
        case OpKind::wait:
          wait(op, mine);
          break;
        default:
          if (op.section == Section::transient && (op.kind == OpKind::map || op.kind == OpKind::unmap)) break;
          mine[at(op.stream)] = static_cast<std::int32_t>(i);
          follow(static_cast<std::int32_t>(i));
      }
    }
  }

 private:
  struct Event {
    StreamId stream{};
    Clock known = before_all;
  };
  /// What a stream waited for since its last op: the ops that the events stand behind. What nothing follows joins the
  /// block's border.
  using Waits = std::vector<std::int32_t>;

  std::string named(std::int32_t i) const {
    const Op& op = ops_[static_cast<std::size_t>(i)];
    return fmt::format("{} '{}'", name_of(op.kind), label_of(program_, op));
  }
  void fault(std::int32_t i, const std::string& text) {
    const Op& op = ops_[static_cast<std::size_t>(i)];
    faults_.add(fmt::format("{}, op {} ({} '{}'): {}", place_, i, name_of(op.kind), op.name, text));
  }

  void wait(const Op& op, Clock& mine) {
    const auto found = recorded_.find(op.event);
    if (found == recorded_.end()) return;  // a fault of its own (verify_walks.cc)
    const auto& [stream, known] = found->second;
    // An event that no op of the block stands before is a border's.
    if (known[at(stream)] >= 0) waits_[at(op.stream)].push_back(known[at(stream)]);
    merge(mine, known);
  }

  void follow(std::int32_t i) {
    const Op& op = ops_[static_cast<std::size_t>(i)];
    Waits& waits = waits_[at(op.stream)];
    const auto needed = [&](std::int32_t earlier) { std::erase(waits, earlier); };
    order_.follow(
        op, i, [&](StreamId, std::int32_t earlier) { needed(earlier); },
        [&](StreamId stream, std::int32_t earlier, const SlotLimit& limit) {
          if (known_[at(op.stream)][at(stream)] < earlier)
            fault(i, fmt::format("takes a slot of '{}', which has {}, without waiting for {}", limit.name, limit.slots,
                                 named(earlier)));
          needed(earlier);
        });
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side)
        if (const SlotLimit* limit = order_.lost_slot(t.buffer))
          fault(i, fmt::format("touches '{}' when its slot of '{}', which has {}, is taken again",
                               program_.buffers[static_cast<std::size_t>(t.buffer)].name, limit->name, limit->slots));
    for (std::int32_t w : waits)
      fault(i, fmt::format("false wait: shares no buffer with {}, and no slot limit asks for it", named(w)));
    waits.clear();
  }

  const Program& program_;
  const std::vector<Op>& ops_;
  Faults& faults_;
  std::string place_;
  TrueOrder order_;
  std::array<Clock, num_streams> known_;
  std::array<Waits, num_streams> waits_;  // since the stream's last op
  std::map<EventId, Event> recorded_;
};

}  // namespace

void check_waits(const Plan& plan, std::size_t index, Faults& faults) {
  const Program& program = plan.programs[index];
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      BlockOrder(program, block, faults,
                 fmt::format("program {}: phase {}, block {}", index, plan.phases[p].name, block.name))
          .run();
}

}  // namespace hotbunk
