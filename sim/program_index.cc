#include "sim/program_index.h"

#include <algorithm>
#include <functional>

#include "base/check.h"

namespace hotbunk {
namespace {

Occupies occupies_of(const Op& op) {
  switch (op.kind) {
    case OpKind::alloc:
    case OpKind::free:
    case OpKind::record:
    case OpKind::wait:
    case OpKind::peer_copy:  // the order against the owner is kept by barriers
      return Occupies::stream;
    case OpKind::map:
    case OpKind::unmap:
      return Occupies::host;
    case OpKind::send:
      return Occupies::sender;
    case OpKind::recv:
      return Occupies::receiver;
    default:
      break;
  }
  if (is_communication(op.kind)) return Occupies::meeting;
  switch (op.stream) {
    case StreamId::h2d:
      return Occupies::link_h2d;
    case StreamId::d2h:
      return Occupies::link_d2h;
    case StreamId::host:
      return Occupies::stream;
    default:
      return Occupies::device;
  }
}

DependsOn depends_on(const Op& op) {
  if (op.kind == OpKind::attention || op.kind == OpKind::attention_backward || op.kind == OpKind::paged_attention)
    return DependsOn::pairs;
  const auto varies = [](const Tensor& t) {
    return std::any_of(t.shape.begin(), t.shape.begin() + t.rank, [](const Dim& d) { return d.sym != Sym::fixed; });
  };
  // kv_write moves as many rows as there are tokens, whatever its pool's shape.
  if (op.kind == OpKind::kv_write || std::any_of(op.inputs.begin(), op.inputs.end(), varies) ||
      std::any_of(op.outputs.begin(), op.outputs.end(), varies))
    return DependsOn::shapes;
  return DependsOn::nothing;
}

}  // namespace

ProgramIndex::ProgramIndex(const Program& program) : program_(&program) {
  for (const auto& blocks : program.phases) {
    auto& first = first_.emplace_back();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      first.push_back(size());
      for (const Op& op : blocks[b].ops)
        ops_.push_back({&op, occupies_of(op), depends_on(op), static_cast<std::int32_t>(b)});
    }
  }
}

std::uint32_t ProgramIndex::find(const Op& op, std::int16_t phase, std::int32_t& hint) const {
  const auto p = static_cast<std::size_t>(phase);
  HB_CHECK(phase >= 0 && p < first_.size(), "phase {} of {}", phase, first_.size());
  const std::vector<Block>& blocks = program_->phases[p];
  const auto at = [&](std::size_t b) -> std::ptrdiff_t {
    const std::vector<Op>& ops = blocks[b].ops;
    const std::less<const Op*> before;
    if (ops.empty() || before(&op, ops.data()) || !before(&op, ops.data() + ops.size())) return -1;
    return &op - ops.data();
  };
  for (std::size_t tried = 0; tried <= blocks.size(); ++tried) {
    const std::size_t b = tried == 0 ? static_cast<std::size_t>(hint) : tried - 1;
    if (b >= blocks.size()) continue;
    if (const std::ptrdiff_t i = at(b); i >= 0) {
      hint = static_cast<std::int32_t>(b);
      return first_[p][b] + static_cast<std::uint32_t>(i);
    }
  }
  HB_CHECK(false, "{} '{}' is no op of phase {} of this plan", name_of(op.kind), op.name, phase);
  return 0;
}

}  // namespace hotbunk
