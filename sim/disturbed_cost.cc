#include "sim/disturbed_cost.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "graph/catalogue.h"

namespace hotbunk {

std::vector<RankFactors> rank_factors(const DisturbanceSpec& d, const ClusterSpec& cluster) {
  if (d.slow_ranks.empty() && d.slow_nodes.empty() && d.slow_links.empty()) return {};
  std::vector<RankFactors> out(static_cast<std::size_t>(cluster.ranks()));
  const auto multiply = [&](const Slowdown& slow, double RankFactors::*which) {
    const std::int64_t first = slow.rank >= 0 ? slow.rank : slow.node * cluster.ranks_per_node(),
                       count = slow.rank >= 0 ? 1 : cluster.ranks_per_node();
    for (std::int64_t r = first; r < first + count; ++r) out.at(static_cast<std::size_t>(r)).*which *= slow.factor;
  };
  for (const auto* all : {&d.slow_ranks, &d.slow_nodes})
    for (const Slowdown& slow : *all) multiply(slow, &RankFactors::own);
  for (const Slowdown& slow : d.slow_links)
    multiply(slow, slow.link == LinkKind::network  ? &RankFactors::network
                   : slow.link == LinkKind::nvlink ? &RankFactors::nvlink
                                                   : &RankFactors::pcie);
  return out;
}

DisturbedCost::DisturbedCost(const OpCost& cost, const DisturbanceSpec& d, const ClusterSpec& cluster)
    : cost_(cost),
      jitter_(d.jitter),
      factors_(rank_factors(d, cluster)),
      ranks_per_node_(std::max<std::int64_t>(1, cluster.ranks_per_node())) {
  for (const RankFactors& f : factors_) classes_.push_back(std::ranges::find(factors_, f) - factors_.begin());
}

double DisturbedCost::factor(const Plan& plan, Rank rank, const Op& op) const {
  if (factors_.empty()) return 1.0;
  const RankFactors& f = factors_.at(static_cast<std::size_t>(rank));
  if (is_communication(op.kind)) {
    if (f.network == f.nvlink) return f.network;
    const std::vector<Rank>& members = plan.group_of(op.group, rank);
    const bool leaves =
        std::ranges::any_of(members, [&](Rank r) { return r / ranks_per_node_ != rank / ranks_per_node_; });
    return leaves ? f.network : f.nvlink;
  }
  switch (op.kind) {
    case OpKind::alloc:
    case OpKind::free:
    case OpKind::map:
    case OpKind::unmap:
    case OpKind::record:
    case OpKind::wait:
      return 1.0;  // the driver's
    case OpKind::feed:
    case OpKind::fetch:
      return f.pcie;
    default:
      return plan.crosses_spaces(op) ? f.pcie : f.own;
  }
}

std::int64_t DisturbedCost::nanoseconds(const Plan& plan, Rank rank, const Op& op, const Args& args) const {
  const std::int64_t ns = cost_.nanoseconds(plan, rank, op, args);
  const double by = factor(plan, rank, op);
  return by == 1.0 ? ns : std::llround(static_cast<double>(ns) * by);
}

double DisturbedCost::jitter(Rank rank, const Op& op, std::uint64_t execution) const {
  if (!jitters() || is_communication(op.kind)) return 1.0;
  // exp(s z - s^2 / 2) has mean 1 and variance exp(s^2) - 1.
  const double variance = std::log1p(jitter_.relative * jitter_.relative);
  const double z = normal2(static_cast<std::uint64_t>(jitter_.seed), RngPurpose::jitter,
                           static_cast<std::uint64_t>(rank), execution)[0];
  return std::exp(std::sqrt(variance) * z - 0.5 * variance);
}

}  // namespace hotbunk
