// metrics.jsonl of a run folder: one line per step with verl's names, so that its dashboards read it.
#pragma once
#include <string>

#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

/// {"step":1,"timing_s/gen":…,…}\n per iteration: the Driver's figures, then
///   timing_s/…                        seconds of a phase over all ranks: gen (rollout), update_actor (train), ref
///                                     (reference), old_log_prob (old_logprobs), step (the iteration); others by name
///   perf/total_num_tokens             prompt + response tokens trained in the step, where the lengths are reported
///   perf/throughput                   those tokens per second and rank
///   perf/max_memory_allocated_gb      highest live bytes of any rank in the run, GiB (as verl counts its "gb")
///   perf/max_memory_reserved_gb       highest mapped bytes, GiB
std::string metrics_jsonl(const Plan&, const Scenario&, const Trace&);

}  // namespace hotbunk
