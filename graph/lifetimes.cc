// insert_lifetimes and assign_offsets: when transient buffers live, and where.
#include <algorithm>
#include <map>

#include "graph/best_fit.h"
#include "graph/passes.h"

namespace hotbunk {
namespace {

constexpr std::int64_t alignment = 64;  // a cache line; oneDNN and AVX-512 loads want it

std::int64_t aligned(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

struct Use {
  std::size_t first = 0, last = 0;
};

void insert_in_block(Block& block, const std::set<BufferId>& transients) {
  std::map<BufferId, Use> uses;
  std::set<BufferId> managed;  // alloc'ed or freed by hand here
  for (std::size_t i = 0; i < block.ops.size(); ++i) {
    const Op& op = block.ops[i];
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) managed.insert(op.buffer);
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side)
        if (transients.contains(t.buffer)) {
          auto [it, added] = uses.try_emplace(t.buffer, Use{i, i});
          it->second.last = i;
        }
  }
  std::map<std::size_t, std::vector<BufferId>> begins, ends;
  for (const auto& [id, use] : uses)
    if (!managed.contains(id)) begins[use.first].push_back(id), ends[use.last].push_back(id);
  std::vector<Op> ops;
  ops.reserve(block.ops.size() + 2 * uses.size());
  const auto manage = [&](OpKind kind, StreamId stream, BufferId id) {
    Op op;
    op.kind = kind;
    op.stream = stream;
    op.buffer = id;
    ops.push_back(std::move(op));
  };
  for (std::size_t i = 0; i < block.ops.size(); ++i) {
    const StreamId stream = block.ops[i].stream;
    if (auto it = begins.find(i); it != begins.end())
      for (BufferId id : it->second) manage(OpKind::alloc, stream, id);
    ops.push_back(std::move(block.ops[i]));
    if (auto it = ends.find(i); it != ends.end())
      for (BufferId id : it->second) manage(OpKind::free, stream, id);
  }
  block.ops = std::move(ops);
}

}  // namespace

void insert_lifetimes(Program& program, const std::set<BufferId>& transients) {
  for (auto& blocks : program.phases)
    for (Block& block : blocks) insert_in_block(block, transients);
}

void assign_offsets(const Plan& plan, Program& program) {
  program.section_bytes.fill(0);
  for (Buffer& b : program.buffers) {
    if (b.section == Section::transient) continue;
    std::int64_t& end = program.section_bytes[static_cast<std::size_t>(b.section)];
    b.offset = end;
    end = aligned(end + b.bytes(), alignment);
  }
  BestFit ranges;
  std::int64_t high = 0;
  for (auto& blocks : program.phases)
    for (Block& block : blocks)
      for (const Op& op : block.ops) {
        if (op.kind != OpKind::alloc && op.kind != OpKind::free) continue;
        Buffer& b = program.buffers[static_cast<std::size_t>(op.buffer)];
        if (b.section != Section::transient || b.bytes() == 0) continue;
        const std::int64_t bytes = aligned(b.bytes(), alignment);
        if (op.kind == OpKind::alloc) {
          b.offset = ranges.take(bytes);
          high = std::max(high, b.offset + bytes);
        } else {
          ranges.give(b.offset, bytes);
        }
      }
  program.section_bytes[static_cast<std::size_t>(Section::transient)] = high;
  for (std::int64_t& bytes : program.section_bytes) bytes = aligned(bytes, plan.chunk_bytes);
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
