// A trace for chrome://tracing and ui.perfetto.dev.
#pragma once
#include <string>

#include "trace/trace.h"

namespace hotbunk {

/// Trace Event Format, JSON object form: pid = rank, tid = 0 for phases and 1 + StreamId for streams, both named;
/// spans with bytes, FLOPs and their rates; counters of live bytes by category per rank and space; a flow arrow from
/// the rank that arrived last at a collective to each rank of its group that waited for it.
/// Source of the format: "Trace Event Format", Google, docs of catapult.
std::string chrome_trace(const Plan&, const Trace&);

}  // namespace hotbunk
