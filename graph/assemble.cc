// assemble: which calls of a draft share a body, and what is local to them.
#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/hash.h"
#include "graph/passes.h"

namespace hotbunk {
namespace {

/// What bodies that are alike have in common, and few others: a sync in small buckets has thousands of bodies of one
/// name, all different.
std::uint64_t fingerprint(const Body& body) {
  std::uint64_t all = static_cast<std::uint64_t>(body.num_ports), place = 0;
  const auto note = [&](std::int64_t value) { all += element_hash(place++, static_cast<std::uint64_t>(value)); };
  const auto note_side = [&](const Side& side) {
    const Piece& piece = side.piece;
    const Parts& parts = side.parts;
    for (std::int64_t value : {piece.row_begin, piece.row_end, piece.col_begin, piece.col_end, piece.offset, parts.rows,
                               parts.cols, parts.run.begin, parts.run.elements, parts.within.rows, parts.within.cols})
      note(value);
  };
  note(static_cast<std::int64_t>(body.locals.size()));
  for (const Op& op : body.ops) {
    note(static_cast<std::int64_t>(op.kind)), note(op.buffer), note(op.group);
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side) note(t.buffer), note(t.offset_bytes), note(t.capacity());
    for (const auto& [attr, value] : op.attrs)
      note(std::visit([](auto v) { return std::bit_cast<std::int64_t>(v + 0); }, value));  // -0.0 is 0.0
    for (const Move& move : op.moves) note_side(move.from), note_side(move.to);
  }
  return all;
}

class Assembly {
 public:
  explicit Assembly(Draft draft)
      : draft_(std::move(draft)), may_be_local_(draft_.buffers.size(), false), variants_(draft_.bodies.size()) {
    for (BufferId id : draft_.transients) may_be_local_[index(id)] = true;
    for (const SlotLimit& limit : draft_.slot_limits)
      for (const auto& turn : limit.turns)
        for (BufferId id : turn) may_be_local_[index(id)] = false;
    name_all();
    keep_shared_ones();
  }

  Program run() {
    program_.sections = draft_.sections;
    program_.num_events = draft_.num_events;
    for (auto& blocks : draft_.phases) {
      auto& out = program_.phases.emplace_back();
      for (DraftBlock& block : blocks) {
        Block& made = out.emplace_back();
        made.name = std::move(block.name), made.enters = block.enters, made.section = block.section;
        for (DraftCall& call : block.calls)
          if (!draft_.body_of(call).ops.empty()) made.calls.push_back(call_of(std::move(call)));
      }
    }
    drop_locals();
    return std::move(program_);
  }

 private:
  static std::size_t index(BufferId id) { return static_cast<std::size_t>(id); }

  void name_all() {
    for (const auto& blocks : draft_.phases)
      for (const DraftBlock& block : blocks)
        for (const DraftCall& call : block.calls)
          for (std::int32_t i = 0; i < call.num_unnamed; ++i) {
            std::string& name = draft_.buffers[index(call.first_unnamed + i)].name;
            name.insert(0, call.name);
          }
  }

  /// What several calls touch is no local of any.
  void keep_shared_ones() {
    std::vector<std::int32_t> toucher(draft_.buffers.size(), -1);
    std::int32_t at = 0;
    for (const auto& blocks : draft_.phases)
      for (const DraftBlock& block : blocks)
        for (const DraftCall& call : block.calls) {
          const DraftBody& body = draft_.body_of(call);
          for (std::size_t s = 0; s < call.slots.size(); ++s) {
            const DraftBody::Slot& slot = body.slots[s];
            if (slot.first < 0 && !slot.by_hand) continue;
            const std::size_t id = index(call.slots[s].buffer);
            if (slot.shown || (toucher[id] >= 0 && toucher[id] != at)) may_be_local_[id] = false;
            toucher[id] = at;
          }
          ++at;
        }
  }

  /// What becomes of a body of the draft in the calls that allocate and free the same slots of it.
  struct Variant {
    std::vector<DraftMemory> memory;
    std::vector<bool> local;                 // [slot]
    std::int32_t body = 0;                   // of the program
    std::vector<std::size_t> ports, locals;  // their slots
  };

  Call call_of(DraftCall draft) {
    const DraftBody& body = draft_.body_of(draft);
    std::vector<bool> local(draft.slots.size(), false);
    for (std::size_t s = 0; s < draft.slots.size(); ++s) local[s] = is_local(draft, body.slots[s], s);
    auto& variants = variants_[static_cast<std::size_t>(draft.body)];
    auto found =
        std::ranges::find_if(variants, [&](const Variant& v) { return v.local == local && v.memory == draft.memory; });
    if (found == variants.end()) found = variants.insert(variants.end(), variant_of(draft, std::move(local)));
    Call call;
    call.body = found->body, call.marks = std::move(draft.marks);
    for (const std::size_t slot : found->ports) {
      const Port& p = draft.slots[slot];
      call.ports.push_back({p.buffer, p.offset_bytes + body.slots[slot].least_offset});
    }
    for (const std::size_t slot : found->locals) {
      local_.push_back(draft.slots[slot].buffer);
      call.locals.push_back(draft_.buffers[index(local_.back())].offset);
    }
    call.name = std::move(draft.name);
    return call;
  }

  bool is_local(const DraftCall& call, const DraftBody::Slot& slot, std::size_t s) const {
    if (slot.first < 0 || slot.by_hand) return false;
    const BufferId id = call.slots[s].buffer;
    // Touched by no other call it is allocated and freed in this one.
    return may_be_local_[index(id)] && draft_.buffers[index(id)].name.starts_with(call.name);
  }

  Variant variant_of(const DraftCall& call, std::vector<bool> local) {
    const DraftBody& from = draft_.body_of(call);
    Variant out{.memory = call.memory, .local = std::move(local), .ports = {}, .locals = {}};
    Body body;
    body.name = from.name;
    each_step(
        from, call,
        [&](const DraftMemory& m, StreamId stream) {
          Op op;
          op.kind = m.kind, op.stream = stream, op.buffer = m.slot;
          body.ops.push_back(std::move(op));
        },
        [&](const Op& op, std::size_t) { body.ops.push_back(op); });
    std::vector<BufferId> number(call.slots.size(), -1);  // in the order in which the ops name them, ports first
    for (const bool locals : {false, true})
      for (const Op& op : body.ops)
        each_slot(op, [&](BufferId slot) {
          if (number[index(slot)] >= 0 || out.local[index(slot)] != locals) return;
          number[index(slot)] = static_cast<BufferId>(out.ports.size() + out.locals.size());
          (locals ? out.locals : out.ports).push_back(index(slot));
        });
    body.num_ports = static_cast<std::int32_t>(out.ports.size());
    for (const std::size_t slot : out.locals) {
      Buffer b = draft_.buffers[index(call.slots[slot].buffer)];
      b.name.erase(0, call.name.size());
      b.offset = 0;
      body.locals.push_back(std::move(b));
    }
    for (Op& op : body.ops) {
      if (is_memory(op)) op.buffer = number[index(op.buffer)];
      for (auto* side : {&op.inputs, &op.outputs})
        for (Tensor& t : *side) {
          if (!out.local[index(t.buffer)]) t.offset_bytes -= from.slots[index(t.buffer)].least_offset;
          t.buffer = number[index(t.buffer)];
        }
    }
    out.body = shared(std::move(body));
    return out;
  }

  static bool is_memory(const Op& op) { return op.kind == OpKind::alloc || op.kind == OpKind::free; }

  template <class F>
  static void each_slot(const Op& op, F&& visit) {
    if (is_memory(op)) visit(op.buffer);
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side) visit(t.buffer);
  }

  /// The number of the body, a new one's if there is none like it.
  std::int32_t shared(Body body) {
    auto& same_name = by_name_[body.name];
    const std::string name = body.name;
    const std::uint64_t content = fingerprint(body);
    const auto [begin, end] = same_name.equal_range(content);
    for (auto candidate = begin; candidate != end; ++candidate) {
      const Body& other = program_.bodies[static_cast<std::size_t>(candidate->second)];
      body.name = other.name;
      if (other == body) return candidate->second;
    }
    const std::int32_t number = static_cast<std::int32_t>(program_.bodies.size());
    body.name = name;
    if (!same_name.empty()) body.name += '/' + std::to_string(same_name.size() + 1);  // "name", "name/2", "name/3"
    same_name.emplace(content, number);
    program_.bodies.push_back(std::move(body));
    return number;
  }

  /// The program's buffers are all but those that became locals, and transients that no op came to use.
  void drop_locals() {
    std::vector<BufferId> number(draft_.buffers.size(), 0);
    for (BufferId id : draft_.transients) number[index(id)] = -1;
    for (const auto& blocks : program_.phases)
      for (const Block& block : blocks)
        for (const Call& call : block.calls)
          for (const Port& port : call.ports) number[index(port.buffer)] = 0;
    for (const SlotLimit& limit : draft_.slot_limits)
      for (const auto& turn : limit.turns)
        for (BufferId id : turn) number[index(id)] = 0;
    for (BufferId id : local_) number[index(id)] = -1;
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
  std::vector<bool> may_be_local_;              // [buffer]
  std::vector<std::vector<Variant>> variants_;  // [body of the draft]
  std::vector<BufferId> local_;
  /// The program's bodies by the draft's name and their fingerprint.
  std::map<std::string, std::unordered_multimap<std::uint64_t, std::int32_t>> by_name_;
  Program program_;
};

}  // namespace

Program assemble(Draft draft) { return Assembly(std::move(draft)).run(); }

}  // namespace hotbunk
