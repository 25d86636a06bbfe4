// insert_dependencies: events between streams, from the buffers that ops share and the slots declared. A vector clock
// per stream says which ops of the other streams are already known to be done, so that only the missing order is added.
#include <algorithm>
#include <array>
#include <vector>

#include "graph/access.h"
#include "graph/passes.h"
#include "graph/true_order.h"

namespace hotbunk {
namespace {

class BlockPass {
 public:
  /// `order`: of the draft, for one block after another.
  BlockPass(Draft& draft, DraftBlock& block, TrueOrder& order) : draft_(draft), block_(block), order_(order) {
    order_.forget();
    known_.fill(before_all);
    last_.fill(-1);
    note_streams();
  }

  void run() {
    for (const DraftCall& call : block_.calls) {
      const DraftBody& body = draft_.body_of(call);
      const std::size_t first = after_.size();
      after_.resize(first + body.ops.size(), -1), clock_at_.resize(first + body.ops.size());
      if (body.maps || !std::ranges::all_of(call.slots, [&](const Port& p) { return is_alone(p.buffer); })) {
        for (std::size_t i = 0; i < body.ops.size(); ++i)
          order(call, body.ops[i], static_cast<std::int32_t>(first + i));
        continue;
      }
      for (std::size_t s = 0; s < max_streams; ++s) {  // nothing that it touches is another stream's
        if (body.last[s] < 0) continue;
        last_[s] = known_[s][s] = static_cast<std::int32_t>(first) + body.last[s];
        used_[s] = true;
      }
    }
    write_marks();
  }

 private:
  static std::uint32_t bit(StreamId s) { return 1u << static_cast<unsigned>(s); }
  static bool several(std::uint32_t streams) { return (streams & (streams - 1)) != 0; }

  /// Which streams touch each buffer and each section. What only one does is in order by itself.
  void note_streams() {
    streams_of_buffer_.resize(draft_.buffers.size(), 0);
    std::size_t num_ops = 0;
    for (const DraftCall& call : block_.calls) {
      const DraftBody& body = draft_.body_of(call);
      num_ops += body.ops.size();
      for (std::size_t s = 0; s < max_streams; ++s)
        if (body.last[s] >= 0) num_streams_ = std::max(num_streams_, s + 1);
      for (std::size_t s = 0; s < call.slots.size(); ++s) {
        const auto id = static_cast<std::size_t>(call.slots[s].buffer);
        streams_of_buffer_[id] |= body.slots[s].streams;
        streams_of_section_[static_cast<std::size_t>(draft_.buffers[id].section)] |= body.slots[s].streams;
      }
      if (!body.maps) continue;
      for (const Op& op : body.ops)
        if (op.kind == OpKind::map || op.kind == OpKind::unmap)
          streams_of_section_[static_cast<std::size_t>(op.section)] |= bit(op.stream);
    }
    after_.reserve(num_ops), clock_at_.reserve(num_ops);
  }
  bool is_alone(BufferId id) const {
    const auto b = static_cast<std::size_t>(id);
    const SectionId section = draft_.buffers[b].section;
    if (section != transient_section) return !several(streams_of_section_[static_cast<std::size_t>(section)]);
    return !several(streams_of_buffer_[b]) && !order_.takes_turn(id);
  }

  bool is_alone(const DraftCall& call, const Op& op) const {
    const auto alone = [&](const Tensor& t) { return is_alone(call.slots[static_cast<std::size_t>(t.buffer)].buffer); };
    return std::ranges::all_of(op.inputs, alone) && std::ranges::all_of(op.outputs, alone);
  }

  /// Makes stream `s`, before op `i`, wait for op `dependency` of stream `t`.
  void add_wait(StreamId s, std::int32_t i, StreamId t, std::int32_t dependency) {
    if (s == t || known_[at(s)][at(t)] >= dependency) return;
    auto& event = after_[static_cast<std::size_t>(dependency)];
    if (event < 0) event = draft_.num_events++;
    waits_.push_back({i, s, event});
    merge(known_[at(s)], clock_at_[static_cast<std::size_t>(dependency)]);
    known_[at(s)][at(t)] = std::max(known_[at(s)][at(t)], dependency);
  }

  void order(const DraftCall& call, const Op& op, std::int32_t i) {
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) return;
    if (op.kind == OpKind::map || op.kind == OpKind::unmap || !is_alone(call, op)) wait_for_needs(call, op, i);
    known_[at(op.stream)][at(op.stream)] = i;
    clock_at_[static_cast<std::size_t>(i)] = known_[at(op.stream)];
    last_[at(op.stream)] = i;
    used_[at(op.stream)] = true;
  }

  void wait_for_needs(const DraftCall& call, const Op& op, std::int32_t i) {
    Clock needed = before_all;
    const auto note = [&](StreamId t, std::int32_t index) { needed[at(t)] = std::max(needed[at(t)], index); };
    const auto access_of = [&](const Tensor& t) {
      const Port& p = call.slots[static_cast<std::size_t>(t.buffer)];
      const Buffer& b = draft_.buffers[static_cast<std::size_t>(p.buffer)];
      const std::int64_t begin = b.offset + p.offset_bytes + t.offset_bytes;
      return Access{b.section, begin, begin + t.capacity_bytes(), false, p.buffer};
    };
    const auto accesses = [&](auto&& visit) {
      each_access_of(op, access_of, [&](const Access& a) {
        if (a.buffer < 0 || !is_alone(a.buffer)) visit(a);
      });
    };
    order_.follow(accesses, op.stream, i, note,
                  [&](StreamId t, std::int32_t index, const SlotLimit&) { note(t, index); });
    needed[at(op.stream)] = -1;
    for (;;) {  // latest dependency first: its clock may imply the others
      const auto latest = std::max_element(needed.begin(), needed.begin() + num_streams_);
      if (*latest < 0) return;
      add_wait(op.stream, i, static_cast<StreamId>(latest - needed.begin()), *latest);
      *latest = -1;
    }
  }

  void write_marks() {
    const auto other = [&](auto&& visit) {
      for (std::size_t s = 0; s < used_.size(); ++s)
        if (used_[s] && s != at(lead_stream)) visit(static_cast<StreamId>(s));
    };
    const auto has_ops = [&](const DraftCall& c) { return !draft_.body_of(c).ops.empty(); };
    bool others = false;
    other([&](StreamId) { others = true; });
    if (others) {  // begin joined
      DraftCall& first = *std::ranges::find_if(block_.calls, has_ops);
      const EventId start = draft_.num_events++;
      first.marks.push_back({0, OpKind::record, lead_stream, start});
      other([&](StreamId s) { first.marks.push_back({0, OpKind::wait, s, start}); });
    }
    std::int32_t op = 0;  // of the block
    auto wait = waits_.cbegin();
    for (DraftCall& call : block_.calls) write_marks(call, op, wait);
    if (!others) return;
    DraftCall& last = *std::find_if(block_.calls.rbegin(), block_.calls.rend(), has_ops);
    const auto end_of_last = static_cast<std::int32_t>(draft_.body_of(last).ops.size() + last.memory.size());
    other([&](StreamId s) {  // end joined
      if (known_[at(lead_stream)][at(s)] >= last_[at(s)]) return;
      const EventId end = draft_.num_events++;
      last.marks.push_back({end_of_last, OpKind::record, s, end});
      last.marks.push_back({end_of_last, OpKind::wait, lead_stream, end});
    });
  }

  struct Wait {
    std::int32_t op;
    StreamId stream;
    EventId event;
  };

  void write_marks(DraftCall& call, std::int32_t& op, std::vector<Wait>::const_iterator& wait) {
    // An alloc comes right before its first use, and behind the waits of that use: from alloc on the range is its own.
    std::int32_t step = 0, run = 0;  // where the allocs begin that stand in front of the step, on one stream
    StreamId run_stream = lead_stream;
    const auto pass = [&](OpKind kind, StreamId stream) {
      ++step;
      if (kind != OpKind::alloc) run = step;
      run_stream = stream;
    };
    const auto come_to = [&](StreamId stream) {
      if (run < step && run_stream != stream) run = step;
    };
    each_step(
        draft_.body_of(call), call,
        [&](const DraftMemory& m, StreamId stream) { come_to(stream), pass(m.kind, stream); },
        [&](const Op& o, std::size_t) {
          come_to(o.stream);
          for (; wait != waits_.cend() && wait->op == op; ++wait)
            call.marks.push_back({run, OpKind::wait, wait->stream, wait->event});
          pass(o.kind, o.stream);
          if (const EventId event = after_[static_cast<std::size_t>(op)]; event >= 0)
            call.marks.push_back({step, OpKind::record, o.stream, event});
          ++op;
        });
  }

  Draft& draft_;
  DraftBlock& block_;
  TrueOrder& order_;
  std::vector<std::uint32_t> streams_of_buffer_;
  std::array<std::uint32_t, max_sections> streams_of_section_{};
  std::array<Clock, max_streams> known_;
  std::array<std::int32_t, max_streams> last_;
  std::array<bool, max_streams> used_{};
  std::size_t num_streams_ = 0;  // up to the last that has ops
  std::vector<Clock> clock_at_;  // of each op of the block
  std::vector<EventId> after_;
  std::vector<Wait> waits_;  // ascending by op
};

}  // namespace

void insert_dependencies(Draft& draft) {
  TrueOrder order(draft.buffers.size(), draft.slot_limits);
  for (auto& blocks : draft.phases)
    for (DraftBlock& block : blocks) BlockPass(draft, block, order).run();
}

}  // namespace hotbunk
