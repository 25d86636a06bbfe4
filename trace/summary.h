// summary.json: what `simulate --json` and `run --json` print (DESIGN: contracts, "hotbunk.trace-summary/1"), and the
// same as tables on a terminal.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

struct Comparison;

/// The document, with its keys in DESIGN's order.
///   peaks              live and mapped bytes of the arena, without overhead; of equal ones the lowest rank's
///   at_peak.overhead   what the plan states, outside the arena; category_peaks likewise
///   fits               largest mapped peak + overhead <= capacity on the device, and on the host where it has one
///   phases             of the kept steps (trace/kept_steps.h): start, the first rank's; seconds, a rank's stay from
///                      entering to leaving, mean over ranks; in order of their start
///   traffic            of the kept steps; ranks of one group with equal counts share a row
///   metrics            whole rows of the kept steps, and between them rows of what was lowest or highest (MetricFold)
///   iteration_seconds  mean over all steps and ranks: from entering an iteration's first phase to leaving its last
///   mfu                model FLOPs / (a rank's seconds of phase "train", mean over ranks, x peak FLOP/s of all devices
///                      at the compute precision); 0 where the peak is not known
///   iteration, phase_totals, traffic_totals
///                      over all steps: times; seconds of a rank, mean over ranks; mean, shortest, longest (and in
///                      which step) exactly, p50 and p95 to 1.1 %, of all ranks' single stays
///   timeline           of the rank with the highest peak (gpu_timeline.h)
///   live_at_peak       the same rank's tensors at the peaks of its fullest phase and of the weight update; their bytes
///                      add up to peak_bytes
///   links              of a simulation (trace.h: LinkTraffic); mean over all iterations
///   kept               of how many of all steps there are rows, the distance of those in between, rows of metrics
nlohmann::ordered_json summarize(const Plan&, const Scenario&, const Trace&);

/// Tables of a summary: verdict, time by phase, memory of the peak rank by phase and category, traffic, metrics.
/// `colour`: ANSI colours, see use_colour. `predicted`: its times stand beside those of the summary, its verdict below.
std::string render_summary(const nlohmann::ordered_json& summary, bool colour, const Comparison* predicted = nullptr);

/// Whether stdout takes colours: it is a terminal and NO_COLOR is not set (https://no-color.org).
bool use_colour();

}  // namespace hotbunk
