#include "reports/metrics_jsonl.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "lowering/sample_rows.h"

namespace hotbunk {
namespace {

std::string verl_name(const std::string& phase) {
  if (phase == "rollout") return "timing_s/gen";
  if (phase == "train") return "timing_s/update_actor";
  if (phase == "reference") return "timing_s/ref";
  if (phase == "old_logprobs") return "timing_s/old_log_prob";
  return "timing_s/" + phase;
}

struct Extent {
  std::int64_t start_ns = INT64_MAX, end_ns = INT64_MIN;
  void cover(const PhaseSpan& p) { start_ns = std::min(start_ns, p.start_ns), end_ns = std::max(end_ns, p.end_ns); }
  double seconds() const { return static_cast<double>(end_ns - start_ns) * 1e-9; }
};

void add_throughput(nlohmann::ordered_json& line, const Plan& plan, const Scenario& scenario, double step_s) {
  if (!line.contains("prompt_length/mean") || !line.contains("response_length/mean")) return;
  const auto samples = static_cast<double>(num_samples(scenario));
  const double per_sample = line["prompt_length/mean"].get<double>() + line["response_length/mean"].get<double>();
  const double tokens = std::round(samples * per_sample);  // a whole number but for the means' rounding
  line["perf/total_num_tokens"] = tokens;
  if (step_s > 0.0) line["perf/throughput"] = tokens / step_s / static_cast<double>(plan.num_ranks());
}

}  // namespace

std::string metrics_jsonl(const Plan& plan, const Scenario& scenario, const Trace& trace) {
  std::map<std::int32_t, std::map<std::int16_t, Extent>> phases;  // by step and phase
  std::map<std::int32_t, Extent> steps;
  for (const PhaseSpan& p : trace.phases) {
    if (plan.phases[static_cast<std::size_t>(p.phase)].when != When::iteration) continue;
    phases[p.step][p.phase].cover(p);
    steps[p.step].cover(p);
  }
  std::int64_t live = 0, mapped = 0;
  for (const RankMemory& m : trace.memory) {
    live = std::max(live, m.device.peak_bytes);
    mapped = std::max(mapped, m.device.mapped_peak_bytes);
  }
  std::string out;
  for (const auto& [step, extent] : steps) {
    nlohmann::ordered_json line = {{"step", step}};
    for (const StepMetrics& m : trace.metrics)
      if (m.step == step)
        for (const auto& [name, value] : m.values) line[name] = value;
    for (const auto& [phase, time] : phases[step])
      line[verl_name(plan.phases[static_cast<std::size_t>(phase)].name)] = time.seconds();
    line["timing_s/step"] = extent.seconds();
    add_throughput(line, plan, scenario, extent.seconds());
    line["perf/max_memory_allocated_gb"] = static_cast<double>(live) / gib;
    line["perf/max_memory_reserved_gb"] = static_cast<double>(mapped) / gib;
    out += line.dump() + '\n';
  }
  return out;
}

}  // namespace hotbunk
