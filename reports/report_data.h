// What the HTML report draws, computed once and embedded in it as JSON: numbers here, pictures in assets/*.js.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "reports/html.h"

namespace hotbunk {

/// Keys: summary, predicted (summary or null), comparison (or null), phases (names) and when they run, categories and
/// streams (names and colours), recorded (until when operations and memory events were kept), drawn (the ranks that
/// have pictures of their own), timeline (live device bytes by category over time, per rank), at_peak (the largest
/// buffers when the peak rank was at its peak), spans, matrix (bytes sent from rank to rank), rollout (busy and idle
/// seconds by engine), lengths (a histogram of the responses, or null), critical (the critical path, or null), visits
/// (each drawn rank's stay in each phase of the recorded steps), samples (lines of samples.jsonl to show), provenance.
nlohmann::ordered_json report_data(const ReportInput&);

}  // namespace hotbunk
