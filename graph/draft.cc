#include "graph/draft.h"

#include <algorithm>
#include <array>
#include <bit>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace hotbunk {

void DraftBody::note_slots(std::size_t num_slots) {
  slots.assign(num_slots, {});
  touches.clear();
  maps = false;
  last.fill(-1);
  std::vector<std::array<std::int32_t, max_streams>> last_touch(num_slots);  // of the slot's streams
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    const auto index = static_cast<std::int32_t>(i);
    maps = maps || op.kind == OpKind::map || op.kind == OpKind::unmap;
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) slots[static_cast<std::size_t>(op.buffer)].by_hand = true;
    else last[static_cast<std::size_t>(op.stream)] = index;
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side) {
        Slot& s = slots[static_cast<std::size_t>(t.buffer)];
        s.least_offset = s.first < 0 ? t.offset_bytes : std::min(s.least_offset, t.offset_bytes);
        if (s.first < 0) s.first = index;
        s.last = index;
        const std::uint32_t stream = 1u << static_cast<unsigned>(op.stream);
        if ((s.streams & stream) == 0) touches.push_back({index, t.buffer});
        s.streams |= stream;
        s.shown = s.shown || (op.kind == OpKind::peer_copy && side == &op.inputs);
        last_touch[static_cast<std::size_t>(t.buffer)][static_cast<std::size_t>(op.stream)] = index;
      }
  }
  for (std::size_t s = 0; s < num_slots; ++s)
    for (std::uint32_t streams = slots[s].streams; streams != 0; streams &= streams - 1)
      touches.push_back({last_touch[s][static_cast<std::size_t>(std::countr_zero(streams))], static_cast<BufferId>(s)});
  std::ranges::sort(touches, {}, &Touch::op);
}

DraftCall written_call(Draft& draft, std::string body_name, std::string name, std::vector<Op> ops,
                       std::span<const Port> inputs) {
  DraftCall call;
  call.slots.assign(inputs.begin(), inputs.end());
  std::unordered_map<BufferId, BufferId> slot_of;
  for (std::size_t i = 0; i < inputs.size(); ++i) slot_of.try_emplace(inputs[i].buffer, static_cast<BufferId>(i));
  const auto slot = [&](BufferId id) {
    const auto [at, added] = slot_of.try_emplace(id, static_cast<BufferId>(call.slots.size()));
    if (added) call.slots.push_back({id, 0});
    return at->second;
  };
  for (Op& op : ops) {
    HB_CHECK(op.name.empty() || op.name.starts_with(name), "op '{}' in call '{}'", op.name, name);
    if (!op.name.empty()) op.name.erase(0, name.size());
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) op.buffer = slot(op.buffer);
    for (auto* side : {&op.inputs, &op.outputs})
      for (Tensor& t : *side) {
        t.buffer = slot(t.buffer);
        t.offset_bytes -= call.slots[static_cast<std::size_t>(t.buffer)].offset_bytes;
      }
  }
  DraftBody body;
  body.name = std::move(body_name), body.ops = std::move(ops);
  body.note_slots(call.slots.size());
  call.name = std::move(name);
  call.body = static_cast<std::int32_t>(draft.bodies.size());
  draft.bodies.push_back(std::move(body));
  return call;
}

}  // namespace hotbunk
