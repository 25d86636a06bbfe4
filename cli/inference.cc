#include "cli/inference.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/check.h"
#include "rl/inference_driver.h"
#include "spec/catalog.h"
#include "spec/model_config.h"
#include "spec/safetensors.h"

namespace hotbunk {

void add_inference_options(const Command& command, InferenceOptions& o) {
  command.option("--model", o.model, "model folder: config.json and safetensors").required();
  command.option("--tokens", o.tokens, "JSONL, one array of token ids per line; blank lines are skipped").required();
  command.option("--dtype", o.dtype, "compute in fp32 or bf16").check(one_of({"fp32", "bf16"}));
  command.option("--threads", o.threads, "compute threads (default: all cores)").check(thread_count());
  command.flag("--json", o.json, "one JSON document on stdout, nothing else there");
}

DType dtype_of(const InferenceOptions& o) { return o.dtype == "bf16" ? DType::bf16 : DType::f32; }

Result<ModelSpec> open_model(const std::string& folder) {
  auto model = load_model(folder);
  // A bare config.json starts a scenario at random; here that would be an answer about nothing.
  if (model && model->weights_path.empty()) return fail(no_weights(std::filesystem::absolute(folder).parent_path()));
  return model;
}

std::optional<std::vector<TokenSequence>> run_inference(const Scenario& scenario, Purpose purpose,
                                                        std::vector<TokenSequence> sequences, const InferenceOptions& o,
                                                        int& code) {
  auto plan = lower(scenario, purpose);
  if (!plan) {
    code = report_errors(plan.error());
    return std::nullopt;
  }
  const Job job{scenario, std::move(*plan), {}};
  if (const auto error = fit_error(job)) {
    code = report_errors({*error});
    return std::nullopt;
  }
  auto driver = InferenceDriver::create(job.plan, scenario, std::move(sequences));
  if (!driver) {
    code = report_errors(driver.error());
    return std::nullopt;
  }
  try {
    CpuWorld world;
    CpuOptions cpu;
    cpu.compute_threads = static_cast<int>(o.threads > 0 ? o.threads : local_machine().cores);
    CpuBackend backend(world, **driver, cpu);
    if (auto trace = execute(job.plan, backend, **driver, {.steps = 1, .local_ranks = {0}}); !trace) {
      code = report_errors(trace.error());
      return std::nullopt;
    }
  } catch (const RuntimeFailure& e) {
    code = report_errors({stopped(e.what())});
    return std::nullopt;
  }
  return (*driver)->sequences();
}

Status check_finite(const std::vector<TokenSequence>& sequences, const InferenceOptions& o) {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto& values = sequences[i].rollout_logps;
    const auto bad = std::find_if(values.begin(), values.end(), [](float x) { return !std::isfinite(x); });
    if (bad == values.end()) continue;
    return fail(
        Diagnostic{.code = "E620",
                   .message = fmt::format("the model's log-prob {} of sequence {} is {}", bad - values.begin() + 1,
                                          i + 1, std::isnan(*bad) ? "NaN" : "infinite"),
                   .where = {o.model},
                   .notes = {fmt::format("its weights are finite; what they compute in {} is not", o.dtype)},
                   .help = "the weights or the config are of a run that diverged, or of another model"});
  }
  return {};
}

std::vector<double> as_written(const std::vector<float>& values) {
  std::vector<double> out;
  for (const float value : values) {
    const std::string text = fmt::format("{}", value);
    double number = 0.0;
    std::from_chars(text.data(), text.data() + text.size(), number);
    out.push_back(number);
  }
  return out;
}

}  // namespace hotbunk
