// Weight updates and sleep figures of RL systems.
#include <fmt/format.h>

#include <map>

#include "planner/rl/sync_model.h"
#include "planner/train/layer_kinds.h"
#include "planner/validate/validate_tables.h"

namespace hotbunk {
namespace {

/// Models that the catalogue lacks: parameters and tensors counted from their config.json, without the layer that
/// predicts a second token. GLM-4.5: 3 dense layers of 14 tensors and 89 of 11 + 160 * 3 + 5, and 3 outside of them.
struct ModelSize {
  double parameters, tensors;
};
const std::map<std::string, ModelSize>& model_sizes() {
  static const std::map<std::string, ModelSize> cards = {
      {"GLM-4.5-Air", {106.85e9, 17925}}, {"GLM-4.5", {352.80e9, 44189}}, {"Kimi-K2", {1026.4e9, 69975}}};
  return cards;
}

/// A rank count that the source may leave open: 8, one node.
std::int64_t ranks_of(CellReader& cells, const char* column) {
  return cells.text(column).empty() ? 8 : cells.count(column);
}

/// What is sent, and from how many ranks to how many.
Result<SyncJob> job_of(CellReader& cells, ValidationContext& context) {
  SyncJob job;
  double parameters = 0.0;
  if (const auto card = model_sizes().find(without_variant(cells.text("model"))); card != model_sizes().end()) {
    parameters = card->second.parameters;
    job.tensors = card->second.tensors;
  } else {
    auto model = context.model(context.model_named(cells, cells.text("model")));
    if (!model) return fail(model.error());
    parameters = static_cast<double>(parameter_count(*model));
    job.tensors = tensor_count(*model);
  }
  const std::string& precision = cells.text("precision");
  if (precision != "bf16" && precision != "fp16" && precision != "fp8")
    cells.refuse(fmt::format("precision '{}' is bf16, fp16 or fp8", precision));
  job.model_bytes = cells.text("payload_gb").empty() ? parameters * (precision == "fp8" ? 1.0 : 2.0)
                                                     : cells.measured("payload_gb") * 1e9;
  job.sources = ranks_of(cells, "gpus_source");
  job.targets = ranks_of(cells, "gpus_target");
  // One engine of eight ranks where the source names no TP degree.
  const std::string& target = cells.text("target_layout");
  const std::size_t at = target.find("tp");
  const int tp = at == std::string::npos ? 8 : std::atoi(target.c_str() + at + 2);
  if (tp < 1 || tp > job.targets) cells.refuse(fmt::format("target_layout '{}' on {} ranks", target, job.targets));
  job.target_parts = std::max(tp, 1);
  return job;
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
  if (auto has = csv.require({"system", "mechanism", "model", "payload_gb", "precision", "target_layout", "gpus_source",
                              "gpus_target", "hardware", "seconds_low", "seconds_high"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string& targets = cells.text("gpus_target");  // that the source may leave open
    const std::string label = fmt::format("{} {} {}{}", cells.text("system"), cells.text("mechanism"),
                                          cells.text("model"), targets.empty() ? "" : " to " + targets);
    const auto mechanism = mechanisms.find(cells.text("mechanism"));
    if (mechanism == mechanisms.end())
      cells.refuse(fmt::format("mechanism '{}' is not known", cells.text("mechanism")));
    auto job = job_of(cells, context);
    if (!job) return fail(job.error());
    auto cost = context.cost(context.gpu_named(cells, cells.text("hardware")), std::max(job->sources, job->targets));
    if (!cost) return fail(cost.error());
    const SyncMechanism how = mechanism == mechanisms.end() ? SyncMechanism::bucketed : mechanism->second;
    const double low = cells.measured("seconds_low"), high = cells.measured("seconds_high");
    if (high < low) cells.refuse(fmt::format("seconds_high {} is below seconds_low {}", high, low));
    const double measured = (low + high) / 2.0;
    put(out, label, cells, measured, price_sync(how, *job, *cost).seconds());
    const auto elsewhere = sync_constants_elsewhere(how, context.catalogue() / "sync.yaml");
    if (!elsewhere) return fail(elsewhere.error());
    if (!cells.usable()) continue;
    if (*elsewhere) out.left_out.rows.push_back({label, measured, price_sync(how, *job, *cost, **elsewhere).seconds()});
    else out.left_out.skipped.push_back({label, fmt::format("{} alone measured it", cells.text("system"))});
  }
  out.left_out.how = "every row of its system";
  // The same rows: what is left out of them is another thing, and is in left_out.csv.
  ValidationTable again{
      "weight_sync_configurations", out.quantity, out.unit, "the rows of weight_sync", out.rows, out.skipped, {}};
  again.rows_of = out.name;
  return std::vector<ValidationTable>{out, again};
}

TableResult validate_rl_phases(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "rl_phases", "memory of a communicator",
      "MB",        "the frameworks' default; the row is the setting's source, so this only checks the plumbing",
      {},          {},
      {}};
  if (auto has = csv.require({"source", "quantity", "model", "setting", "value"}); !has) return fail(has.error());
  auto frame = context.framework("hotbunk");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string label = fmt::format("{} {} {} {}", cells.text("source"), cells.text("quantity"),
                                          cells.text("model"), cells.text("setting"));
    if (cells.text("quantity") == "GRPO iteration")
      cells.refuse("rl_iterations has the iterations of this source, with their lengths");
    if (cells.text("quantity") != "memory per communicator" || cells.text("setting") == "2 ranks")
      cells.refuse("an implementation's own overhead, no layout to predict it from");
    put(out, label, cells, "value", frame->communicator_bytes.value / 1e6);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
