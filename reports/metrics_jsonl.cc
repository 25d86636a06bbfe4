#include "reports/metrics_jsonl.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/format.h"
#include "base/json.h"
#include "base/lines.h"
#include "lowering/sample_rows.h"
#include "trace/folds.h"

namespace hotbunk {
namespace {

std::string verl_name(const std::string& phase) {
  if (phase == "rollout") return "timing_s/gen";
  if (phase == "train") return "timing_s/update_actor";
  if (phase == "reference") return "timing_s/ref";
  if (phase == "old_logprobs") return "timing_s/old_log_prob";
  return "timing_s/" + phase;
}

}  // namespace

double StepFigures::step_seconds() const {
  return stays.empty() ? 0.0 : static_cast<double>(stays.back().end_ns - stays.front().start_ns) * 1e-9;
}

std::vector<StepMetrics> recorded_figures(const std::filesystem::path& path) {
  MetricFold fold;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return fold.rows();  // a stream would wait at a pipe
  std::ifstream file(path);
  for (std::string line; next_line(file, line) < LineRead::failed;) {
    const auto json = json_or_discarded<nlohmann::json>(line);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) break;
    StepMetrics step{.step = json["step"].get<std::int32_t>(), .values = {}};
    for (const auto& [key, value] : json.items())
      if (value.is_number() && key != "step" && !key.starts_with("timing_s/") && !key.starts_with("perf/"))
        step.values[key] = value.get<double>();
    fold.add(step);
  }
  return fold.rows();
}

double trained_tokens(const Scenario& scenario, const StepMetrics& metrics) {
  const auto prompt = metrics.values.find("prompt_length/mean"), response = metrics.values.find("response_length/mean");
  if (prompt == metrics.values.end() || response == metrics.values.end()) return 0.0;
  // A whole number but for the means' rounding.
  return std::round(static_cast<double>(num_samples(scenario)) * (prompt->second + response->second));
}

std::string metrics_line(const Plan& plan, const Scenario& scenario, const StepFigures& step) {
  nlohmann::ordered_json line = {{"step", step.metrics.step}};
  for (const auto& [name, value] : step.metrics.values) line[name] = value;
  for (const PhaseSpan& stay : step.stays)
    line[verl_name(plan.phases[static_cast<std::size_t>(stay.phase)].name)] =
        static_cast<double>(stay.end_ns - stay.start_ns) * 1e-9;
  const double step_s = step.step_seconds();
  line["timing_s/step"] = step_s;
  if (const double tokens = trained_tokens(scenario, step.metrics); tokens > 0.0) {
    line["perf/total_num_tokens"] = tokens;
    if (step_s > 0.0) line["perf/throughput"] = tokens / step_s / static_cast<double>(plan.num_ranks());
  }
  line["perf/max_memory_allocated_gb"] = static_cast<double>(step.device.peak_bytes) / gib;
  line["perf/max_memory_reserved_gb"] = static_cast<double>(step.device.mapped_peak_bytes) / gib;
  return json_text(line);
}

std::string metrics_jsonl(const Plan& plan, const Scenario& scenario, const Trace& trace) {
  std::map<std::int32_t, std::vector<PhaseSpan>> steps;
  for (const PhaseSpan& p : trace.phases)
    if (p.rank == 0 && plan.phases[static_cast<std::size_t>(p.phase)].when == When::iteration)
      steps[p.step].push_back(p);
  const SpaceMemory device = trace.memory.empty() ? SpaceMemory{} : trace.memory.front().device;
  std::string out;
  for (const auto& [step, stays] : steps) {
    const auto found = std::ranges::find(trace.metrics, step, &StepMetrics::step);
    const StepMetrics metrics = found == trace.metrics.end() ? StepMetrics{step, {}} : *found;
    out += metrics_line(plan, scenario, {metrics, stays, device}) + '\n';
  }
  return out;
}

}  // namespace hotbunk
