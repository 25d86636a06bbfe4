// assemble: which calls of a draft share a body, and what is local to them.
#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "graph/passes.h"

namespace hotbunk {
namespace {

/// The ops of one call of a draft, with its events between them.
struct Written {
  const DraftCall* call = nullptr;
  std::vector<Op> ops;
  std::vector<Mark> marks;
};

/// Calls visit(tensor) for the tensors of an op.
template <class F>
void each_tensor(Op& op, F&& visit) {
  for (auto* side : {&op.inputs, &op.outputs})
    for (Tensor& t : *side) visit(t);
}

bool is_memory(const Op& op) { return op.kind == OpKind::alloc || op.kind == OpKind::free; }

class Assembly {
 public:
  explicit Assembly(Draft draft) : draft_(std::move(draft)), may_be_local_(draft_.buffers.size(), false) {
    for (BufferId id : draft_.transients) may_be_local_[static_cast<std::size_t>(id)] = true;
    for (const SlotLimit& limit : draft_.slot_limits)
      for (const auto& turn : limit.turns)
        for (BufferId id : turn) may_be_local_[static_cast<std::size_t>(id)] = false;
    keep_shared_ones();
  }

  Program run() {
    program_.section_bytes = draft_.section_bytes;
    program_.num_events = draft_.num_events;
    for (auto& blocks : draft_.phases) {
      auto& out = program_.phases.emplace_back();
      for (DraftBlock& block : blocks) out.push_back(assembled(block));
    }
    drop_locals();
    return std::move(program_);
  }

 private:
  /// What several calls touch is no local of any.
  void keep_shared_ones() {
    std::vector<std::int64_t> toucher(draft_.buffers.size(), -1);
    std::int64_t call = 0;
    for (auto& blocks : draft_.phases)
      for (DraftBlock& block : blocks) {
        std::int32_t at = -1;
        for (DraftOp& op : block.ops) {
          if (op.call != std::exchange(at, op.call)) ++call;
          const auto touch = [&](BufferId id) {
            std::int64_t& by = toucher[static_cast<std::size_t>(id)];
            if (by >= 0 && by != call) may_be_local_[static_cast<std::size_t>(id)] = false;
            by = call;
          };
          if (is_memory(op)) touch(op.buffer);
          each_tensor(op, [&](const Tensor& t) { touch(t.buffer); });
          if (op.kind == OpKind::peer_copy)  // peers know it by its name
            for (const Tensor& t : op.inputs) may_be_local_[static_cast<std::size_t>(t.buffer)] = false;
        }
      }
  }

  Block assembled(DraftBlock& block) {
    Block out{.name = std::move(block.name), .calls = {}, .enters = block.enters, .section = block.section};
    for (Written& written : split(block)) out.calls.push_back(call_of(std::move(written)));
    return out;
  }

  static std::vector<Written> split(DraftBlock& block) {
    std::vector<Written> out;
    std::int32_t at = -1;
    for (DraftOp& op : block.ops) {
      if (op.call != at) {
        at = op.call;
        out.emplace_back().call = &block.calls.at(static_cast<std::size_t>(at));
      }
      Written& w = out.back();
      if (op.kind == OpKind::record || op.kind == OpKind::wait)
        w.marks.push_back({static_cast<std::int32_t>(w.ops.size()), op.kind, op.stream, op.event});
      else w.ops.push_back(std::move(static_cast<Op&>(op)));
    }
    return out;
  }

  /// What a call has of a buffer.
  struct Held {
    BufferId buffer = -1;
    std::int64_t least_offset = 0;  // of its tensors
    bool touched = false;
    int allocs = 0, frees = 0;
    BufferId slot = -1;
  };

  std::vector<Held> held_by(Written& w) const {
    std::vector<Held> out;
    std::map<BufferId, std::size_t> index;
    const auto held = [&](BufferId id) -> Held& {
      const auto [at, added] = index.try_emplace(id, out.size());
      if (added) out.push_back({.buffer = id});
      return out[at->second];
    };
    for (Op& op : w.ops) {
      if (is_memory(op)) ++(op.kind == OpKind::alloc ? held(op.buffer).allocs : held(op.buffer).frees);
      each_tensor(op, [&](const Tensor& t) {
        Held& h = held(t.buffer);
        h.least_offset = h.touched ? std::min(h.least_offset, t.offset_bytes) : t.offset_bytes;
        h.touched = true;
      });
    }
    return out;
  }

  bool is_local(const Held& h, std::string_view prefix) const {
    return may_be_local_[static_cast<std::size_t>(h.buffer)] && h.touched && h.allocs == 1 && h.frees == 1 &&
           draft_.buffers[static_cast<std::size_t>(h.buffer)].name.starts_with(prefix);
  }

  Call call_of(Written w) {
    const std::string& prefix = w.call->name;
    Call call;
    call.name = prefix, call.marks = std::move(w.marks);
    Body body;
    body.name = w.call->body;
    std::vector<Held> held = held_by(w);
    for (Held& h : held) {
      if (is_local(h, prefix)) continue;
      h.slot = body.num_ports++;
      call.ports.push_back({h.buffer, h.least_offset});
    }
    for (Held& h : held) {
      if (h.slot >= 0) continue;
      h.slot = body.num_slots();
      Buffer local = draft_.buffers[static_cast<std::size_t>(h.buffer)];
      local.name.erase(0, prefix.size());
      local.offset = 0;
      call.locals.push_back(0);  // until it is placed
      body.locals.push_back(std::move(local));
      local_.push_back(h.buffer);
    }
    std::map<BufferId, const Held*> of;
    for (const Held& h : held) of[h.buffer] = &h;
    for (Op& op : w.ops) {
      HB_CHECK(op.name.empty() || op.name.starts_with(prefix), "op '{}' in call '{}'", op.name, prefix);
      if (!op.name.empty()) op.name.erase(0, prefix.size());
      if (is_memory(op)) op.buffer = of.at(op.buffer)->slot;
      each_tensor(op, [&](Tensor& t) {
        const Held& h = *of.at(t.buffer);
        if (h.slot < body.num_ports) t.offset_bytes -= h.least_offset;
        t.buffer = h.slot;
      });
    }
    body.ops = std::move(w.ops);
    call.body = shared(std::move(body));
    return call;
  }

  /// The number of the body, a new one's if there is none like it.
  std::int32_t shared(Body body) {
    auto& same_name = by_name_[body.name];
    for (std::int32_t i : same_name) {
      Body& other = program_.bodies[static_cast<std::size_t>(i)];
      body.name = other.name;
      if (other == body) return i;
    }
    const std::int32_t number = static_cast<std::int32_t>(program_.bodies.size());
    if (!same_name.empty()) {  // "name", "name/2", "name/3"
      body.name = program_.bodies[static_cast<std::size_t>(same_name.front())].name;
      body.name += '/' + std::to_string(same_name.size() + 1);
    }
    same_name.push_back(number);
    program_.bodies.push_back(std::move(body));
    return number;
  }

  /// The program's buffers are all but those that became locals.
  void drop_locals() {
    std::vector<BufferId> number(draft_.buffers.size(), 0);
    for (BufferId id : local_) number[static_cast<std::size_t>(id)] = -1;
    for (std::size_t i = 0; i < number.size(); ++i) {
      if (number[i] < 0) continue;
      number[i] = static_cast<BufferId>(program_.buffers.size());
      program_.buffers.push_back(std::move(draft_.buffers[i]));
    }
    for (auto& blocks : program_.phases)
      for (Block& block : blocks)
        for (Call& call : block.calls)
          for (Port& port : call.ports) port.buffer = number[static_cast<std::size_t>(port.buffer)];
    program_.slot_limits = std::move(draft_.slot_limits);
    for (SlotLimit& limit : program_.slot_limits)
      for (auto& turn : limit.turns)
        for (BufferId& id : turn) id = number[static_cast<std::size_t>(id)];
  }

  Draft draft_;
  std::vector<bool> may_be_local_;  // [buffer]
  std::vector<BufferId> local_;
  std::map<std::string, std::vector<std::int32_t>> by_name_;  // bodies
  Program program_;
};

}  // namespace

Program assemble(Draft draft) { return Assembly(std::move(draft)).run(); }

}  // namespace hotbunk
