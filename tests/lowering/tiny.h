// A model small enough to count by hand, lowered under any settings.
//   H 24, 4 heads and 2 KV heads of 6, I 40, 3 layers, vocabulary 33, fp32:
//   a layer has q 24*24 + k 12*24 + v 12*24 + o 24*24 + gate, up, down 3*40*24 + two norms of 24 = 4656 elements,
//   the root embedding and head 2*33*24 + norm 24 = 1608.
#pragma once
#include <string>
#include <vector>

#include "spec/scenario.h"
#include "tests/blocks.h"

namespace hotbunk::test {

inline constexpr std::int64_t layers = 3, layer_elements = 4656, root_elements = 33 * 24, head_elements = 24 + 33 * 24;

/// GRPO; sleeping; `sets` are --set arguments.
Scenario tiny(int world, int tp, std::vector<std::string> sets = {});
Plan lowered(const Scenario&);

/// The ops of one block; internal fault when there is none.
std::vector<Op> ops_of(const Plan&, Rank, std::string_view phase, std::string_view block);

}  // namespace hotbunk::test
