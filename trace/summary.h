// summary.json: what `simulate --json` and `run --json` print (DESIGN: contracts, "hotbunk.trace-summary/1"), and the
// same as tables on a terminal.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

/// The document, with its keys in DESIGN's order.
///   peaks              live and mapped bytes of the arena, without overhead; of equal ones the lowest rank's
///   at_peak.overhead   what the plan states, outside the arena; category_peaks likewise
///   fits               largest mapped peak + overhead <= capacity on the device, and on the host where it has one
///   phases             per step, from the first rank's start to the last rank's end, in order of their start
///   traffic            ranks of one group with equal counts share a row
///   iteration_seconds  mean over steps: from the first start to the last end of the phases of an iteration
///   mfu                model FLOPs / (seconds of phase "train" x peak FLOP/s of all devices at the compute precision);
///                      0 where the peak is not known
nlohmann::ordered_json summarize(const Plan&, const Scenario&, const Trace&);

/// Tables of a summary: verdict, time by phase, memory of the peak rank by phase and category, traffic, metrics.
/// `colour`: ANSI colours, see use_colour.
std::string render_summary(const nlohmann::ordered_json& summary, bool colour);

/// Whether stdout takes colours: it is a terminal and NO_COLOR is not set (https://no-color.org).
bool use_colour();

}  // namespace hotbunk
