// insert_lifetimes: when transient buffers live.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/passes.h"

namespace hotbunk {
namespace {

/// Adds the allocs and frees of one block after another; what it knows of a buffer is of the block at hand.
class LifetimePass {
 public:
  explicit LifetimePass(Draft& draft) : draft_(draft), uses_(draft.buffers.size()) {
    for (BufferId id : draft.transients) use(id).transient = true;
    if (!draft.kept.empty()) find_kept();
  }

  void run(DraftBlock& block) {
    note_uses(block);
    const auto here = [&](const DraftBlock* b) { return b == nullptr || b == &block; };
    added_.assign(block.calls.size(), 0);
    for (const BufferId id : used_) {
      const Use& u = use(id);
      if (u.by_hand) continue;
      ++added_[u.first.call], ++added_[u.last.call];
    }
    for (std::size_t c = 0; c < added_.size(); ++c)
      if (added_[c] > 0) block.calls[c].memory.reserve(block.calls[c].memory.size() + added_[c]);
    for (const BufferId id : used_) {
      Use& u = use(id);
      u.used = false;
      if (std::exchange(u.by_hand, false)) continue;
      if (here(u.first_block)) block.calls[u.first.call].memory.push_back({u.first.op, OpKind::alloc, u.first.slot});
      if (here(u.last_block)) block.calls[u.last.call].memory.push_back({u.last.op, OpKind::free, u.last.slot});
    }
    for (DraftCall& call : block.calls)
      std::ranges::sort(call.memory, {}, [&](const DraftMemory& m) {
        return std::tuple(m.op, m.kind == OpKind::free, call.slots[static_cast<std::size_t>(m.slot)].buffer);
      });
  }

 private:
  struct Place {
    std::size_t call = 0;
    std::int32_t op = 0;
    BufferId slot = -1;
    auto key() const { return std::pair(call, op); }
  };
  struct Use {
    Place first, last;
    bool transient = false, used = false, by_hand = false;
    const DraftBlock *first_block = nullptr, *last_block = nullptr;  // of what is kept
  };
  Use& use(BufferId id) { return uses_[static_cast<std::size_t>(id)]; }

  void find_kept() {
    std::vector<bool> kept(draft_.buffers.size(), false);
    for (BufferId id : draft_.kept) kept[static_cast<std::size_t>(id)] = true;
    for (const auto& blocks : draft_.phases)
      for (const DraftBlock& block : blocks)
        for (const DraftCall& call : block.calls)
          for (std::size_t s = 0; s < call.slots.size(); ++s) {
            const BufferId id = call.slots[s].buffer;
            if (!kept[static_cast<std::size_t>(id)] || draft_.body_of(call).slots[s].first < 0) continue;
            if (use(id).first_block == nullptr) use(id).first_block = &block;
            use(id).last_block = &block;
          }
  }

  void note_uses(const DraftBlock& block) {
    used_.clear();
    for (std::size_t c = 0; c < block.calls.size(); ++c) {
      const DraftCall& call = block.calls[c];
      const DraftBody& body = draft_.body_of(call);
      for (std::size_t s = 0; s < call.slots.size(); ++s) {
        const DraftBody::Slot& slot = body.slots[s];
        Use& u = use(call.slots[s].buffer);
        if (!u.transient || (slot.first < 0 && !slot.by_hand)) continue;
        const Place first{c, slot.first, static_cast<BufferId>(s)}, last{c, slot.last, static_cast<BufferId>(s)};
        if (!u.used) used_.push_back(call.slots[s].buffer);
        if (!u.used || first.key() < u.first.key()) u.first = first;
        if (!u.used || last.key() > u.last.key()) u.last = last;
        u.used = true, u.by_hand = u.by_hand || slot.by_hand;
      }
    }
  }

  const Draft& draft_;
  std::vector<Use> uses_;           // by buffer
  std::vector<BufferId> used_;      // the transients that the block touches
  std::vector<std::size_t> added_;  // by call of the block: room for its allocs and frees
};

}  // namespace

void insert_lifetimes(Draft& draft) {
  LifetimePass pass(draft);
  for (auto& blocks : draft.phases)
    for (DraftBlock& block : blocks) pass.run(block);
}

}  // namespace hotbunk
