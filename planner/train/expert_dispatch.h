// Where the tokens of mixture-of-experts layers go: how many places a token's experts lie in, and what is sent there.
#pragma once
#include <cstdint>

#include "planner/cost/cost_model.h"
#include "spec/model.h"

namespace hotbunk {

/// Expected number of different parts, of `parts` equal ranges of experts, that hold a token's experts. Experts are
/// taken to be chosen evenly, without repetition, among those of topk_groups of the groups, themselves chosen evenly;
/// parts divide groups or hold whole ones.
double expected_parts(const MoeSpec&, std::int64_t parts);

/// Bytes per token and byte of hidden state that leave a rank: to other nodes, and to ranks of a node it is on or got
/// to.
struct Copies {
  double network = 0, node = 0;
};
/// One copy for every expert, each sent where the expert is (Megatron's all-to-all dispatcher).
Copies copies_per_expert(const MoeSpec&, const GroupShape&);
/// One copy for every node that has one of its experts, over the network; there one for every rank (DeepEP, HybridEP).
Copies copies_per_place(const MoeSpec&, const GroupShape&);

}  // namespace hotbunk
