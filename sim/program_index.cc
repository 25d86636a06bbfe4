#include "sim/program_index.h"

#include <algorithm>
#include <functional>

#include "base/check.h"

namespace hotbunk {
namespace {

Occupies occupies_of(const Plan& plan, const Op& op) {
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
    case OpKind::recv:
    case OpKind::send_recv:
      return Occupies::transfer;
    default:
      break;
  }
  if (is_communication(op.kind)) return Occupies::meeting;
  switch (plan.stream(op.stream).kind) {
    case StreamKind::to_device:
      return Occupies::link_h2d;
    case StreamKind::to_host:
      return Occupies::link_d2h;
    case StreamKind::host:
      return Occupies::stream;
    default:
      return Occupies::device;
  }
}

DependsOn depends_on(const Op& op) {
  if (op.is_priced())
    return op.prices.size() > 1 || op.prices[0].seconds_per_pair > 0 ? DependsOn::pairs : DependsOn::nothing;
  if (op.kind == OpKind::attention || op.kind == OpKind::attention_backward || op.kind == OpKind::paged_attention)
    return DependsOn::pairs;
  const auto varies = [](const Tensor& t) {
    return std::any_of(t.shape.begin(), t.shape.begin() + t.rank,
                       [](const Dim& d) { return d.extent != fixed_extent; });
  };
  // kv_write moves as many rows as there are tokens, whatever its pool's shape.
  if (op.kind == OpKind::kv_write || std::any_of(op.inputs.begin(), op.inputs.end(), varies) ||
      std::any_of(op.outputs.begin(), op.outputs.end(), varies))
    return DependsOn::shapes;
  return DependsOn::nothing;
}

}  // namespace

ProgramIndex::ProgramIndex(const Plan& plan, const Program& program) : program_(&program) {
  for (const auto& blocks : program.phases) {
    auto& of_phase = first_.emplace_back();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      auto& of_block = of_phase.emplace_back();
      for (const Call& call : blocks[b].calls) {
        of_block.push_back(size());
        each_step(
            program, blocks[b], call,
            [&](const BoundOp& op) {
              ops_.push_back({op, occupies_of(plan, *op), depends_on(*op), static_cast<std::int32_t>(b)});
            },
            [](const Mark&) {});
      }
    }
  }
}

ProgramIndex::Place ProgramIndex::find_call(const BoundOp& op, std::int16_t phase) const {
  const auto p = static_cast<std::size_t>(phase);
  HB_CHECK(phase >= 0 && p < first_.size(), "phase {} of {}", phase, first_.size());
  const auto block = static_cast<std::size_t>(op.block - program_->phases[p].data());
  HB_CHECK(op.program == program_ && block < first_[p].size(), "{} '{}' is no op of phase {} of this plan",
           name_of(op->kind), op.name(), phase);
  const auto call = static_cast<std::size_t>(op.call - op.block->calls.data());
  return {first_[p][block].at(call), static_cast<std::int32_t>(block)};
}

}  // namespace hotbunk
