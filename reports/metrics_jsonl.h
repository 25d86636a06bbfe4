// metrics.jsonl of a run folder: one line per step with verl's names, so that its dashboards read it.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

/// One step of one rank, the one that writes.
struct StepFigures {
  const StepMetrics& metrics;        // from the Driver
  std::span<const PhaseSpan> stays;  // the rank's, of this step
  const SpaceMemory& device;         // the rank's peaks so far
  double step_seconds() const;       // from entering the iteration's first phase to leaving its last
};

/// {"step":1,"timing_s/gen":…,…} without an end of line: the Driver's figures, then
///   timing_s/…                        the rank's seconds in a phase: gen (rollout), update_actor (train), ref
///                                     (reference), old_log_prob (old_logprobs), step (the iteration); others by name
///   perf/total_num_tokens             prompt + response tokens trained in the step, where the lengths are reported
///   perf/throughput                   those tokens per second and rank
///   perf/max_memory_allocated_gb      the rank's highest live bytes so far, GiB (as verl counts its "gb")
///   perf/max_memory_reserved_gb       its highest mapped bytes, GiB
std::string metrics_line(const Plan&, const Scenario&, const StepFigures&);

/// The Driver's figures of all steps of such a file, thinned as a trace's are (MetricFold): what is left of steps whose
/// process has ended. A line that is torn or no object ends it. Nothing where there is no file.
std::vector<StepMetrics> recorded_figures(const std::filesystem::path&);

/// Prompt + response tokens trained in a step; 0 where the lengths are not reported.
double trained_tokens(const Scenario&, const StepMetrics&);

/// Rank 0's lines of the iterations that a trace has rows of.
std::string metrics_jsonl(const Plan&, const Scenario&, const Trace&);

}  // namespace hotbunk
