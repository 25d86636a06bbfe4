#include "planner/train/expert_dispatch.h"

#include <algorithm>

namespace hotbunk {
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
