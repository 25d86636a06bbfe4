// What of a token travels to experts of other data ranks: a row for each of its experts, or one copy for each rank that
// has some of them (train.expert_dispatch).
#pragma once
#include <cstdint>

#include "spec/expert_mesh.h"
#include "spec/model.h"
#include "spec/scenario.h"

namespace hotbunk {

/// Expected number of different parts, of `parts` equal ranges of experts, that hold a token's experts. Experts are
/// taken to be chosen evenly, without repetition, among those of topk_groups of the groups, themselves chosen evenly;
/// parts divide groups or hold whole ones.
double expected_parts(const MoeSpec&, std::int64_t parts);

/// The same of the ranks that a token's experts are on, of which `parts` share each (ExpertMesh).
double expected_copies(const MoeSpec&, const ExpertMesh&);

/// What the two ways of dispatch cost in a layer: seconds of what goes to experts in forward and of its gradients that
/// come back, of a full micro-batch on one rank, over the slowest link of the groups that spread them, by the cluster's
/// keys: bytes over bandwidth, and one latency an exchange. Copies are as many as even choices make; with them go, once
/// in forward, an all-to-all of their numbers and an all-gather of where they begin.
struct DispatchSeconds {
  double per_expert = 0.0, per_rank = 0.0;
};
/// Assumes: data ranks have other experts each.
DispatchSeconds dispatch_seconds(const Scenario&);

/// per_expert or per_rank. Of `auto`: per_rank where it is executed and costs less.
ExpertDispatch chosen_dispatch(const Scenario&);

/// Copies of a micro-batch on one rank.
struct ExpertCopies {
  std::int64_t sent_most = 0;  // to all ranks: min(ranks, choices) of each token
  std::int64_t came_most = 0;  // from all ranks: every token of each
  double of_token = 0;         // expected, choices being even
};
/// Nothing where rows travel for each expert.
ExpertCopies expert_copies(const Scenario&);

}  // namespace hotbunk
