// A plan as text, for people: what `hotbunk plan --print` shows, and what changed between two plans.
#pragma once
#include <string>
#include <string_view>

#include "graph/plan.h"

namespace hotbunk {

struct PrintOptions {
  std::string phase;     // only this phase's ops; "" = all
  bool ops = true;       // false: phases and blocks with counts and sizes only
  bool buffers = false;  // the table of buffers of each program
};

/// Header, groups, sections, and per program and phase the blocks with their ops, one a line:
///   gather   all_gather  layers.0  over fsdp  shard bf16[1024] -> full bf16[4096]
std::string print_plan(const Plan&, const PrintOptions& = {});

/// One op as print_plan writes it, without indentation.
/// What a message calls an op that may have no name of its own: its name, else its buffer's, section's or event's.
std::string label_of(const Program&, const Op&);
std::string print_op(const Plan&, const Program&, const Op&);
/// "hidden bf16[tokens<=4096, 512]", with "+N" bytes when the window does not start where the buffer does.
std::string print_tensor(const Program&, const Tensor&);

/// What b has that a has not and the other way round, one line each, "+ ", "- " and "~ " (changed) in front: scalars,
/// groups, phases, and per program sections, buffers (by name) and ops (by phase, block, kind and name; where these are
/// the same, by content and then by order). Empty exactly when a == b.
std::string diff_plans(const Plan& a, const Plan& b);

}  // namespace hotbunk
