// Korthikanti et al. on A100: seconds, activations and states of Megatron with and without sequence parallelism.
#include <fmt/format.h>

#include <algorithm>

#include "base/format.h"
#include "planner/validate/validate_gpt.h"

namespace hotbunk {
namespace {

/// What the paper calls the quantity, in the table's unit.
double figure(const std::string& quantity, const TrainModel& model, const TrainPoint& p, const TrainPrice& price) {
  const TrainModel::Layers l = model.layers(p);
  const double layers = static_cast<double>(model.model().layers);
  const auto kept_of = [&](const TrainPoint& q, const LayerCost& c) {
    const double each = q.recompute == Recompute::full        ? c.kept_full_bytes
                        : q.recompute == Recompute::selective ? c.kept_selective_bytes
                                                              : c.kept_bytes;
    // Interleaved 1F1B on the first stage: 2 (pp - 1) + (vpp - 1) pp + 1 chunks of L / (pp vpp) layers.
    const double chunks = static_cast<double>(q.vpp > 1 ? 2 * (q.pp - 1) + (q.vpp - 1) * q.pp + 1 : q.pp * q.vpp);
    return each * layers * chunks / static_cast<double>(q.pp * q.vpp);
  };
  if (quantity == "iter_time") return price.step_seconds;
  if (quantity == "layer_forward") return 1e3 * (l.dense.forward + l.dense.tensor_forward);
  if (quantity == "layer_total")
    return figure("layer_forward", model, p, price) + figure("layer_backward", model, p, price);
  if (quantity == "layer_backward") {
    double seconds =
        l.dense.backward + l.dense.tensor_backward - (model.framework().overlap_tensor ? l.dense.hidden_tensor : 0.0);
    if (p.recompute == Recompute::full) seconds += l.dense.forward + l.dense.tensor_forward;
    if (p.recompute == Recompute::selective) seconds += l.dense.recompute_core;
    return 1e3 * seconds;
  }
  if (quantity == "activation_mem") return kept_of(p, l.dense) / gib;
  if (quantity == "param+opt_mem") {
    const StateBytes& b = model.setting().state;
    const double each = b.params + b.grads + b.master + b.moments;
    return each * l.dense.parameters * layers / static_cast<double>(p.pp) / gib;
  }
  if (quantity == "activation_percent_of_baseline") {
    TrainPoint base = p;
    base.sp = false;
    base.recompute = Recompute::none;
    return 100.0 * kept_of(p, l.dense) / kept_of(base, model.dense_layer(base));
  }
  // The paper's hardware FLOPs add what is recomputed to the model's 3 passes.
  const double sequences = static_cast<double>(p.dp * p.micro_batch * p.micro_batches),
               s = static_cast<double>(model.model().max_position), h = static_cast<double>(model.model().hidden);
  const bool again = quantity == "hfu" && p.recompute == Recompute::full;
  double flops = megatron_flops(model.model(), sequences, s, again ? 4.0 : 3.0);
  if (quantity == "hfu" && p.recompute == Recompute::selective) flops += 4.0 * sequences * s * s * h * layers;
  const double peak = model.cost().peak_flops(DType::bf16) * static_cast<double>(p.ranks());
  return 100.0 * flops / peak / price.step_seconds;
}

}  // namespace

TableResult validate_korthikanti(const CsvTable& csv, ValidationContext& context) {
  if (auto has = csv.require({"model", "heads", "hidden", "layers", "tp", "pp", "interleave", "gpus", "global_batch",
                              "micro_batch", "seq", "vocab", "hardware", "quantity", "setting", "value"});
      !has)
    return fail(has.error());
  auto frame = context.framework("megatron-a100");
  if (!frame) return fail(frame.error());
  const char* setting =
      "profile megatron-a100: unfused attention with dropout, fp16, fp32 gradients, Adam unsharded; activations and "
      "states count the transformer layers, as the paper's figures do (its formulas leave embeddings out)";
  ValidationTable iteration{"korthikanti_a100", "iteration time", "s", setting, {}, {}, {{"Calculon", 0.0365, -1.0}}};
  ValidationTable layer{"korthikanti_a100_layer", "layer time", "ms", setting, {}, {}, {}};
  ValidationTable kept{"korthikanti_a100_activations", "activation memory", "GiB", setting, {}, {},
                       {{"Calculon", 0.021, -1.0}}};
  ValidationTable states{"korthikanti_a100_states",  "states memory", "GiB", setting, {}, {},
                         {{"Calculon", 0.085, -1.0}}};
  ValidationTable share{"korthikanti_a100_share", "share of activations", "%", setting, {}, {}, {}};
  ValidationTable use{"korthikanti_a100_mfu", "model and hardware utilisation", "%", setting, {}, {}, {}};
  const std::map<std::string, ValidationTable*> tables = {{"iter_time", &iteration},
                                                          {"layer_forward", &layer},
                                                          {"layer_backward", &layer},
                                                          {"layer_total", &layer},
                                                          {"activation_mem", &kept},
                                                          {"param+opt_mem", &states},
                                                          {"activation_percent_of_baseline", &share},
                                                          {"mfu", &use},
                                                          {"hfu", &use}};
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string how = cells.text("setting"), quantity = cells.text("quantity");
    const std::string label = fmt::format("{} {} {}", cells.text("model"), quantity, how);
    const auto named = tables.find(quantity);
    ValidationTable& table = named == tables.end() ? iteration : *named->second;
    if (named == tables.end()) cells.refuse(fmt::format("quantity '{}' is none of this table", quantity));
    const auto says = [&](const char* word) { return how.find(word) != std::string::npos; };
    if (!says("seq") && !says("selective") && !says("full") && !says("baseline") && how != "any")
      cells.refuse(fmt::format("setting '{}' names neither recomputation nor sequence parallelism", how));
    const std::int64_t gpus = cells.count("gpus");
    const std::string gpu = context.gpu_named(cells, cells.text("hardware"));
    const ModelSpec gpt = gpt_of(cells, {}, cells.count("vocab"));
    TrainPoint p{.tp = cells.count("tp"), .pp = cells.count("pp"), .vpp = cells.count("interleave"), .sp = says("seq")};
    p.dp = cells.share("GPUs", gpus, {p.tp, p.pp});
    p.micro_batch = cells.count("micro_batch");
    p.micro_batches = cells.share("sequences", cells.count("global_batch"), {p.dp, p.micro_batch});
    if (says("full")) p.recompute = Recompute::full;
    if (says("selective")) p.recompute = Recompute::selective;
    auto cost = context.cost(gpu, gpus);
    if (!cost) return fail(cost.error());
    const TrainModel model(gpt, mixed_precision(gpt.max_position), *cost, *frame);
    const TrainPrice price = price_of(cells, context, model, p);
    if (!cells.usable()) {
      table.skipped.push_back({label, cells.why()});
      continue;
    }
    put(table, label, cells, "value", figure(quantity, model, p, price));
  }
  return std::vector<ValidationTable>{iteration, layer, kept, states, share, use};
}

}  // namespace hotbunk
