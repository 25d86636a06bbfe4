#include "planner/train/expert_dispatch.h"

#include <algorithm>

namespace hotbunk {
namespace {

/// n over k, 0 where k is not in 0..n.
double choose(double n, double k) {
  if (k < 0.0 || k > n) return 0.0;
  double out = 1.0;
  for (double i = 0.0; i < k; i += 1.0) out *= (n - i) / (k - i);
  return out;
}

}  // namespace

double expected_parts(const MoeSpec& m, std::int64_t parts) {
  const auto experts = static_cast<double>(m.experts), top = static_cast<double>(m.experts_per_token);
  const auto n = static_cast<double>(std::max<std::int64_t>(parts, 1));
  const double groups = static_cast<double>(std::max<std::int64_t>(m.groups, 1));
  const double open = std::clamp(static_cast<double>(m.topk_groups), 1.0, groups);  // groups that a token may choose in
  const double pool = experts * open / groups;
  const auto missed = [&](double own) { return choose(pool - own, top) / choose(pool, top); };
  double touched = 0.0;  // probability for one part
  if (n >= groups) {
    touched = open / groups * (1.0 - missed(experts / n));
  } else {
    const double own = groups / n;  // groups of a part, of which some are open: hypergeometric
    for (double j = 1.0; j <= own; j += 1.0)
      touched +=
          choose(own, j) * choose(groups - own, open - j) / choose(groups, open) * (1.0 - missed(j * experts / groups));
  }
  return n * touched;
}

Copies copies_per_expert(const MoeSpec& m, const GroupShape& g) {
  const auto ranks = static_cast<double>(g.ranks), local = static_cast<double>(g.per_node);
  const auto top = static_cast<double>(m.experts_per_token);
  return {.network = top * (ranks - local) / ranks, .node = top * (local - 1.0) / ranks};
}

Copies copies_per_place(const MoeSpec& m, const GroupShape& g) {
  const auto nodes = static_cast<double>(g.nodes), local = static_cast<double>(g.per_node);
  // Over the network to the rank of the same place in the node; from there to the ranks of the experts, one of which it
  // may be itself.
  return {.network = expected_parts(m, g.nodes) * (nodes - 1.0) / nodes,
          .node = expected_parts(m, g.ranks) * (local - 1.0) / local};
}

}  // namespace hotbunk
