#include "planner/price/stream_seconds.h"

#include <algorithm>
#include <map>
#include <vector>

#include "graph/bound.h"
#include "graph/clock.h"

namespace hotbunk {

StreamSeconds stream_seconds(const Plan& plan, Rank rank, const Block& block, const Sizes& sizes,
                             const CostModel& cost) {
  const Program& program = plan.program(rank);
  std::map<std::int32_t, std::vector<std::int64_t>> prices;  // of each body's ops, in nanoseconds
  const auto price_of = [&](std::int32_t body) -> const std::vector<std::int64_t>& {
    const auto [at, added] = prices.try_emplace(body);
    if (added)
      for (const Op& op : program.bodies[static_cast<std::size_t>(body)].ops)
        at->second.push_back(cost.op_nanoseconds(plan, rank, op, sizes));
    return at->second;
  };
  std::array<std::int64_t, max_streams> busy{}, end{};  // of the ops so far
  std::map<EventId, std::int64_t> recorded;
  for (const Call& call : block.calls) {
    const std::vector<std::int64_t>& prices_of_ops = price_of(call.body);
    auto price = prices_of_ops.begin();
    each_step(
        program, block, call,
        [&](const BoundOp& op) {
          busy[at(op->stream)] += *price, end[at(op->stream)] += *price;
          ++price;
        },
        [&](const Mark& m) {
          if (m.kind == OpKind::record) recorded[m.event] = end[at(m.stream)];
          else end[at(m.stream)] = std::max(end[at(m.stream)], recorded[m.event]);
        });
  }
  StreamSeconds out;
  for (std::size_t s = 0; s < plan.streams.size(); ++s)
    out.busy.push_back({plan.streams[s].name, 1e-9 * static_cast<double>(busy[s])});
  out.elapsed = 1e-9 * static_cast<double>(*std::ranges::max_element(end));
  return out;
}

}  // namespace hotbunk
