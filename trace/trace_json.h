// trace.json of a run folder: a Trace as compact JSON (schema "hotbunk.trace/3") and back.
//
// Rows are arrays, in the order of the structs' fields (trace.h); streams, op kinds, spaces and categories are written
// as indices into tables of names that the file itself carries.
#pragma once
#include <string>
#include <string_view>

#include "base/diagnostic.h"
#include "trace/trace.h"

namespace hotbunk {

/// A trace and the plan it came from: phases and groups in a trace are indices into that plan.
struct TraceFile {
  std::string plan_hash;
  Trace trace;
};

/// One line of JSON.
std::string trace_to_json(const Trace&, std::string_view plan_hash);

/// The trace, or why the text is none: E111 not JSON (truncated), E112 a missing or wrongly typed value, E113 a value
/// out of range, E114 another schema. Safe on any input: indices into Trace::names are checked; phases and groups are
/// the plan's to check (see trace_fits_plan). `file` is for messages.
Result<TraceFile> trace_from_json(std::string_view text, const std::string& file);

/// E115 when the trace's ranks, phases or groups are not the plan's.
Status trace_fits_plan(const Trace&, const Plan&, const std::string& file);

}  // namespace hotbunk
