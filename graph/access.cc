#include "graph/access.h"

#include <algorithm>

namespace hotbunk {
namespace {

/// A block's allocs and frees of a buffer take turns, so it leaves one changed that it names an odd number of times.
bool leaves_buffers(const Program& program, const Block& block) {
  std::vector<BufferId> named;
  each_op(program, block, [&](const BoundOp& op) {
    if (op->kind != OpKind::alloc && op->kind != OpKind::free) return;
    if (const BoundBuffer b = op.allocated(); !b.is_local()) named.push_back(b.id);
  });
  std::ranges::sort(named);
  for (std::size_t i = 0; i < named.size(); i += 2)
    if (i + 1 == named.size() || named[i] != named[i + 1]) return true;
  return false;
}

}  // namespace

std::vector<BlockVisit> block_visits(const Plan& plan, const Program& program, const WalkTurn& turn) {
  std::vector<BlockVisit> out;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    const Player* const player = plan.phases[p].player(program.role);
    if (player == nullptr || player->steps_back < turn.least_back || player->steps_back > turn.most_back) continue;
    if (plan.phases[p].when != turn.when || (plan.phases[p].every > 1 && !turn.with_periodic)) continue;
    for (std::size_t b = 0; b < program.phases[p].size(); ++b) {
      const BlockVisit visit{static_cast<std::int16_t>(p), static_cast<std::int32_t>(b)};
      out.push_back(visit);
      if (plan.phases[p].driven && !leaves_buffers(program, program.phases[p][b])) out.push_back(visit);
    }
  }
  return out;
}

std::vector<WalkTurn> walk_turns(const Plan& plan, const Program& program) {
  const bool periodic = std::ranges::any_of(plan.phases, [](const PhaseInfo& p) { return p.every > 1; });
  const std::int32_t back = plan.most_steps_back(program.role);
  std::vector<WalkTurn> out = {{.when = When::prologue}};
  for (std::int32_t steps = 1; steps <= back; ++steps)  // runs of fewer iterations than lie between its phases
    for (std::int32_t s = 0; s < back + steps; ++s) out.push_back({.least_back = s - steps + 1, .most_back = s});
  for (std::int32_t s = 0; s < back; ++s) out.push_back({.most_back = s});
  out.push_back({});
  out.push_back({.with_periodic = !periodic});
  if (periodic) out.push_back({});
  for (std::int32_t s = 1; s <= back; ++s) out.push_back({.least_back = s});
  out.push_back({.when = When::epilogue});
  return out;
}

}  // namespace hotbunk
