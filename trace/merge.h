// One trace of a run from the parts that its processes saw.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "trace/trace.h"

namespace hotbunk {

/// What a process sends to rank 0: a Trace with all its fields as they lie in memory, some twenty times as fast to read
/// as trace.json. For processes of one build; never a file (those outlive a build: trace_json.h).
std::string pack_trace(const Trace&);
/// The reverse. InternalError where another build packed it, or it is cut short.
Trace unpack_trace(std::string_view packed);

/// The trace of all ranks: spans, events, phases and metrics are joined (names renumbered, rows in the order rank,
/// start), a rank's memory and traffic come from the part that has them, trained tokens and model FLOPs are taken from
/// the first part that has any, as every process's Driver reports those of all ranks. Internal fault when two parts
/// claim the same rank.
Trace merge_traces(std::span<const Trace> parts);
/// Of what each rank packed.
Trace merge_traces(std::span<const std::string> packed);

}  // namespace hotbunk
