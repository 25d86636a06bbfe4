// insert_lifetimes: when transient buffers live.
#include <algorithm>
#include <utility>
#include <vector>

#include "graph/passes.h"

namespace hotbunk {
namespace {

/// Adds the allocs and frees of one block after another; what it knows of a buffer is of the block at hand.
class LifetimePass {
 public:
  LifetimePass(std::size_t buffers, const std::vector<BufferId>& transients) : uses_(buffers) {
    for (BufferId id : transients) use(id).transient = true;
  }

  void run(DraftBlock& block) {
    note_uses(block);
    const auto by = [&](std::size_t Use::*when) {
      return [this, when](BufferId a, BufferId b) { return std::pair(use(a).*when, a) < std::pair(use(b).*when, b); };
    };
    std::ranges::sort(used_, by(&Use::first));
    std::vector<BufferId> ending = used_;
    std::ranges::sort(ending, by(&Use::last));
    std::vector<DraftOp>& written = block.ops;
    std::vector<DraftOp> ops;
    ops.reserve(written.size() + 2 * used_.size());
    auto begins = used_.begin(), ends = ending.begin();
    for (std::size_t i = 0; i < written.size(); ++i) {
      const StreamId stream = written[i].stream;
      const std::int32_t call = written[i].call;
      for (; begins != used_.end() && use(*begins).first == i; ++begins)
        ops.push_back(memory_op(OpKind::alloc, stream, *begins, call));
      ops.push_back(std::move(written[i]));
      for (; ends != ending.end() && use(*ends).last == i; ++ends)
        ops.push_back(memory_op(OpKind::free, stream, *ends, call));
    }
    block.ops = std::move(ops);
    for (BufferId id : used_) use(id).used = false;
  }

 private:
  struct Use {
    std::size_t first = 0, last = 0;  // indices of ops
    bool transient = false, used = false;
  };
  Use& use(BufferId id) { return uses_[static_cast<std::size_t>(id)]; }

  void note_uses(const DraftBlock& block) {
    used_.clear();
    for (std::size_t i = 0; i < block.ops.size(); ++i)
      for (const auto* side : {&block.ops[i].inputs, &block.ops[i].outputs})
        for (const Tensor& t : *side) {
          Use& u = use(t.buffer);
          if (!u.transient) continue;
          if (!u.used) used_.push_back(t.buffer), u.first = i;
          u.used = true, u.last = i;
        }
    for (const Op& op : block.ops)  // by hand
      if (op.kind == OpKind::alloc || op.kind == OpKind::free) use(op.buffer).used = false;
    std::erase_if(used_, [&](BufferId id) { return !use(id).used; });
  }

  static DraftOp memory_op(OpKind kind, StreamId stream, BufferId id, std::int32_t call) {
    DraftOp op;
    op.call = call;
    op.kind = kind;
    op.stream = stream;
    op.buffer = id;
    return op;
  }

  std::vector<Use> uses_;       // by buffer
  std::vector<BufferId> used_;  // the transients whose lives this block has to give
};

}  // namespace

void insert_lifetimes(Draft& draft) {
  LifetimePass pass(draft.buffers.size(), draft.transients);
  for (auto& blocks : draft.phases)
    for (DraftBlock& block : blocks) pass.run(block);
}

}  // namespace hotbunk
