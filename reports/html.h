// The HTML report: one file that needs no network.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exec/lengths.h"
#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

struct ReportInput {
  const Plan& plan;
  const Scenario& scenario;
  const Trace& trace;                // what the report is about
  const Trace* predicted = nullptr;  // of the same plan; drawn beside `trace` and compared with it
  std::string calibration;           // the profile that the simulated times come from; "" = datasheet efficiencies
  LengthCounts responses = {};       // of all iterations; empty where there is no rollout
  std::vector<nlohmann::ordered_json> samples = {};              // to show (reports/shown_samples.h)
  std::vector<std::pair<std::string, std::string>> origin = {};  // where and when it was made: name, value
};

/// Verdict; how trainer and engine take turns; memory over time; Gantt with the critical path; waterfall; traffic by
/// rank and by link; rollout lengths and tail; metrics; samples; predicted over measured; provenance. Its size does not
/// grow with the number of steps. Every chart has its table. Traces must be of `plan` (trace_fits_plan).
std::string html_report(const ReportInput&);

/// What `plan` says, likewise: verdict, layouts, seconds against bytes, memory by moment, seconds, sensitivity, levers.
/// `data`: scenario, ranks, verdict, seconds_error, why_not_lowered[], findings[], provenance[] (name, value), and the
/// documents `explanation` (hotbunk.explain/1), `search` of hotbunk.plan/1 or null, `sensitivity`.
std::string html_plan(const nlohmann::ordered_json& data);

}  // namespace hotbunk
