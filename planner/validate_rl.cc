// Weight updates and sleep figures of RL systems.
#include <fmt/format.h>

#include <map>

#include "planner/sync_model.h"
#include "planner/validate_tables.h"

namespace hotbunk {
namespace {

/// Parameters (total) of models that the table names and the catalogue may lack; model cards.
struct NamedModel {
  const char* catalogue;
  double parameters, tensors;
};
const std::map<std::string, NamedModel>& named_models() {
  static const std::map<std::string, NamedModel> models = {
      {"GLM-4.5-Air", {"", 106e9, 17500}},
      {"Kimi-K2", {"", 1026e9, 69700}},
      {"DeepSeek-V3.1", {"deepseek-v3", 0, 0}},
      {"DeepSeek-V3", {"deepseek-v3", 0, 0}},
      {"Qwen3-235B-A22B", {"qwen3-235b-a22b", 0, 0}},
      {"Qwen3-30B-A3B", {"qwen3-30b-a3b", 0, 0}},
      {"Qwen3-4B", {"qwen3-4b", 0, 0}},
  };
  return models;
}

}  // namespace

TableResult validate_weight_sync(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"weight_sync",
                      "seconds of an update",
                      "s",
                      "measured: the middle of the published range; parameter counts from the catalogue or model cards",
                      {},
                      {},
                      {}};
  const std::map<std::string, SyncMechanism> mechanisms = {{"broadcast", SyncMechanism::broadcast},
                                                           {"p2p", SyncMechanism::point_to_point},
                                                           {"nccl_reshard", SyncMechanism::shard_to_shard},
                                                           {"per-tensor ipc", SyncMechanism::per_tensor_ipc},
                                                           {"async gather", SyncMechanism::async_gather},
                                                           {"bucketed", SyncMechanism::bucketed},
                                                           {"flattened buckets", SyncMechanism::flattened_buckets}};
  const std::map<std::string, std::string> gpus = {
      {"H800", "h800-sxm-80gb"}, {"H20", "h20-sxm-96gb"}, {"H100", "h100-sxm-80gb"}};
  for (std::size_t i = 0; i < csv.size(); ++i) {
    const CsvTable::Row r = csv.row(i);
    const std::string label =
        fmt::format("{} {} {} to {}", r.text("system"), r.text("mechanism"), r.text("model"), r.text("gpus_target"));
    const auto mechanism = mechanisms.find(r.text("mechanism"));
    const auto named = named_models().find(r.text("model"));
    const auto gpu = gpus.find(r.text("hardware"));
    if (mechanism == mechanisms.end() || named == named_models().end() || gpu == gpus.end()) {
      out.skipped.push_back({label, "mechanism, model or GPU unknown"});
      continue;
    }
    SyncJob job;
    double parameters = named->second.parameters;
    job.tensors = named->second.tensors;
    if (*named->second.catalogue) {
      auto model = context.model(named->second.catalogue);
      if (!model) return fail(model.error());
      parameters = static_cast<double>(parameter_count(*model));
      job.tensors = tensor_count(*model);
    }
    const double width = r.text("precision") == "fp8" ? 1.0 : 2.0;
    job.model_bytes = r.number("payload_gb") > 0 ? r.number("payload_gb") * 1e9 : parameters * width;
    job.sources = r.integer("gpus_source", 8);
    job.targets = r.integer("gpus_target", 8);
    const std::string target = r.text("target_layout");
    job.target_tp = 8;
    if (const std::size_t at = target.find("tp"); at != std::string::npos)
      job.target_tp = std::max(1, std::atoi(target.c_str() + at + 2));
    auto cost = context.cost(gpu->second, std::max(job.sources, job.targets));
    if (!cost) return fail(cost.error());
    const double measured = (r.number("seconds_low") + r.number("seconds_high")) / 2.0;
    out.rows.push_back({label, measured, price_sync(mechanism->second, job, *cost).seconds});
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_rl_phases(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "rl_phases", "memory of a communicator",
      "MB",        "the frameworks' default; the row is the setting's source, so this only checks the plumbing",
      {},          {},
      {}};
  auto frame = context.framework("hotbunk");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    const CsvTable::Row r = csv.row(i);
    const std::string label =
        fmt::format("{} {} {} {}", r.text("source"), r.text("quantity"), r.text("model"), r.text("setting"));
    if (r.text("quantity") == "memory per communicator" && r.text("setting") != "2 ranks") {
      out.rows.push_back({label, r.number("value"), FrameworkProfile{}.communicator_bytes.value / 1e6});
    } else if (r.text("quantity") == "GRPO iteration") {
      out.skipped.push_back({label, "the source gives no prompt and response lengths"});
    } else {
      out.skipped.push_back({label, "an implementation's own overhead, no layout to predict it from"});
    }
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
