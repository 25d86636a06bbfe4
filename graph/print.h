// A plan as text, for people: what `hotbunk plan --print` shows, and what changed between two plans.
#pragma once
#include <string>
#include <string_view>

#include "graph/bound.h"

namespace hotbunk {

struct PrintOptions {
  std::string phase;     // only this phase's blocks, and the bodies that they call; "" = all
  bool ops = true;       // false: phases and blocks with counts and sizes only
  bool buffers = false;  // the table of buffers of each program
};

/// Header, groups, sections, and per program the bodies with their ops, then per phase the blocks with their calls:
///   body train.gather: 3 ports, 3 ops, 58 calls
///       gather   all_gather         all_gather  over fsdp  port1 bf16[1024] -> port2 bf16[4096]
///   block micro: 371 calls, 2154 ops
///       train.gather  train.layers.0.  (train.layers.0.shard, ...)  |  0 gather waits 7  3 gather records 8
std::string print_plan(const Plan&, const PrintOptions& = {});

/// What a message calls an op: of an alloc or free its buffer, of a map or unmap its section, else its name.
std::string label_of(const BoundOp&);
/// "op 4 (fetch 'logps')", behind "call 3 'train.head.', " where the block has several.
std::string where_in_block(const BoundOp&);
/// One op of a body as print_plan writes it, without indentation.
std::string print_op(const Plan&, const Program&, const Body&, const Op&);
/// One call likewise; without `numbers`, not where its locals lie, nor which events it has.
std::string print_call(const Plan&, const Program&, const Call&, bool numbers = true);

/// "at most 4096, counted by the device".
std::string print_extent(const Extent&);

/// What b has that a has not and the other way round, one line each, "+ ", "- " and "~ " (changed) in front: scalars,
/// groups, phases, and per program sections, buffers and bodies (by name) and calls (by phase, block and name; where
/// these are the same, by content and then by order). Empty exactly when a == b.
std::string diff_plans(const Plan& a, const Plan& b);

}  // namespace hotbunk
