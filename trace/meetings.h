// Which spans of a trace are one collective: a trace repeats names, the plan knows the groups.
#pragma once
#include <cstddef>
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// Indices into Trace::spans, one list per collective of two or more members: the n-th time a rank runs an op in a
/// phase of a step meets the n-th time of the others in its group. Sends and receives are no meetings.
std::vector<std::vector<std::size_t>> meetings_of(const Plan&, const Trace&);

}  // namespace hotbunk
