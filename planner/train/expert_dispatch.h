// Where the tokens of mixture-of-experts layers go: how many places a token's experts lie in, and what is sent there.
#pragma once
#include <cstdint>

#include "layout/expert_copies.h"
#include "planner/cost/cost_model.h"
#include "spec/model.h"

namespace hotbunk {

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
