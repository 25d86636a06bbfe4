// insert_dependencies: events between streams, from the buffers that ops share and the slots declared. A vector clock
// per stream says which ops of the other streams are already known to be done, so that only the missing order is added.
#include <algorithm>
#include <array>
#include <vector>

#include "graph/passes.h"
#include "graph/true_order.h"

namespace hotbunk {
namespace {

class BlockPass {
 public:
  BlockPass(Draft& draft, DraftBlock& block)
      : draft_(draft), ops_(block.ops), order_(draft.buffers.size(), draft.slot_limits) {
    known_.fill(before_all);
    last_.fill(-1);
    after_.resize(ops_.size(), -1);
    before_.resize(ops_.size());
    clock_at_.resize(ops_.size(), before_all);
  }

  void run() {
    for (std::size_t i = 0; i < ops_.size(); ++i) order(static_cast<std::int32_t>(i));
    rebuild();
  }

 private:
  /// Makes stream `s`, before op `i`, wait for op `dependency` of stream `t`.
  void add_wait(StreamId s, std::int32_t i, StreamId t, std::int32_t dependency) {
    if (s == t || known_[at(s)][at(t)] >= dependency) return;
    auto& event = after_[static_cast<std::size_t>(dependency)];
    if (event < 0) event = draft_.num_events++;
    before_[static_cast<std::size_t>(i)].push_back({s, event});
    merge(known_[at(s)], clock_at_[static_cast<std::size_t>(dependency)]);
    known_[at(s)][at(t)] = std::max(known_[at(s)][at(t)], dependency);
  }

  void order(std::int32_t i) {
    const Op& op = ops_[static_cast<std::size_t>(i)];
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) return;
    Clock needed = before_all;
    const auto note = [&](StreamId t, std::int32_t index) { needed[at(t)] = std::max(needed[at(t)], index); };
    order_.follow([&](auto&& visit) { each_access(draft_.buffers, op, visit); }, op.stream, i, note,
                  [&](StreamId t, std::int32_t index, const SlotLimit&) { note(t, index); });
    // Latest dependency first: its clock may imply the others.
    std::array<std::size_t, num_streams> by_recency;
    for (std::size_t s = 0; s < by_recency.size(); ++s) by_recency[s] = s;
    std::sort(by_recency.begin(), by_recency.end(), [&](auto a, auto b) { return needed[a] > needed[b]; });
    for (std::size_t t : by_recency)
      if (needed[t] >= 0) add_wait(op.stream, i, static_cast<StreamId>(t), needed[t]);
    known_[at(op.stream)][at(op.stream)] = i;
    clock_at_[static_cast<std::size_t>(i)] = known_[at(op.stream)];
    last_[at(op.stream)] = i;
    used_[at(op.stream)] = true;
  }

  static DraftOp event_op(OpKind kind, StreamId stream, EventId event, std::int32_t call) {
    DraftOp op;
    op.call = call;
    op.kind = kind;
    op.stream = stream;
    op.event = event;
    return op;
  }

  void rebuild() {
    std::vector<DraftOp> ops;
    ops.reserve(ops_.size() * 5 / 4 + 16);
    const auto other = [&](auto&& visit) {
      for (std::size_t s = 0; s < used_.size(); ++s)
        if (used_[s] && s != at(StreamId::compute)) visit(static_cast<StreamId>(s));
    };
    bool several = false;
    other([&](StreamId) { several = true; });
    if (several) {  // begin joined
      const EventId start = draft_.num_events++;
      const std::int32_t first = ops_.front().call;
      ops.push_back(event_op(OpKind::record, StreamId::compute, start, first));
      other([&](StreamId s) { ops.push_back(event_op(OpKind::wait, s, start, first)); });
    }
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const StreamId stream = ops_[i].stream;
      const std::int32_t call = ops_[i].call;
      // An alloc comes right before its first use, and behind the waits of that use: from alloc on the range is its
      // own.
      std::size_t user = i;
      while (user + 1 < ops_.size() && ops_[user].kind == OpKind::alloc && ops_[user + 1].stream == stream) ++user;
      for (const auto& [s, event] : before_[user]) ops.push_back(event_op(OpKind::wait, s, event, call));
      before_[user].clear();
      ops.push_back(std::move(ops_[i]));
      if (after_[i] >= 0) ops.push_back(event_op(OpKind::record, stream, after_[i], call));
    }
    const std::int32_t last = ops.empty() ? 0 : ops.back().call;
    other([&](StreamId s) {  // end joined
      if (known_[at(StreamId::compute)][at(s)] >= last_[at(s)]) return;
      const EventId end = draft_.num_events++;
      ops.push_back(event_op(OpKind::record, s, end, last));
      ops.push_back(event_op(OpKind::wait, StreamId::compute, end, last));
    });
    ops_ = std::move(ops);
  }

  struct Wait {
    StreamId stream;
    EventId event;
  };

  Draft& draft_;
  std::vector<DraftOp>& ops_;  // of the block
  TrueOrder order_;
  std::array<Clock, num_streams> known_;
  std::array<std::int32_t, num_streams> last_;
  std::array<bool, num_streams> used_{};
  std::vector<Clock> clock_at_;
  std::vector<EventId> after_;
  std::vector<std::vector<Wait>> before_;
};

}  // namespace

void insert_dependencies(Draft& draft) {
  for (auto& blocks : draft.phases)
    for (DraftBlock& block : blocks) BlockPass(draft, block).run();
}

}  // namespace hotbunk
