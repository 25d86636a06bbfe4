// GPT-3-like training on A100 and H100: Megatron's papers and README, Llama 3, MegaScale's baseline, vTrain.
#include <fmt/format.h>

#include <algorithm>

#include "planner/validate_tables.h"

namespace hotbunk {
namespace {

/// FLOPs of one GPT iteration as Megatron's papers count them: attention over the whole square, `passes` of 24 B s l h²
/// (3: forward and backward; 4: with full recomputation).
double megatron_flops(const ModelSpec& m, double sequences, double s, double passes) {
  const auto h = static_cast<double>(m.hidden), l = static_cast<double>(m.layers), v = static_cast<double>(m.vocab);
  return passes * 24.0 * sequences * s * l * h * h * (1.0 + s / (6.0 * h)) + 6.0 * sequences * s * h * v;
}

/// The fastest of the settings that a source leaves open: micro-batches of 1 to 16 sequences, and for pipelines the
/// number of interleaved chunks, up to 8.
struct Choice {
  TrainPoint point;
  TrainPrice price;
  std::string why;  // none was found
};
Choice fastest(const CellReader& cells, const TrainModel& model, TrainPoint p, std::int64_t sequences_per_replica,
               double capacity, bool any_micro_batch, bool any_interleave) {
  Choice best;
  best.price.step_seconds = 1e30;
  if (!cells.usable()) return best;
  const std::int64_t asked = p.micro_batch, chunks = p.vpp, most_chunks = any_interleave && p.pp > 1 ? 8 : 1;
  for (std::int64_t b = any_micro_batch ? 1 : asked; b <= (any_micro_batch ? 16 : asked); b *= 2)
    for (std::int64_t v = any_interleave ? 1 : chunks; v <= std::max(most_chunks, chunks); ++v) {
      if (sequences_per_replica % b != 0) continue;
      p.micro_batch = b;
      p.micro_batches = sequences_per_replica / b;
      p.vpp = v;
      if (!model.divides(p)) continue;
      const TrainPrice price = model.price(p);
      if (price.total_bytes() <= capacity && price.step_seconds < best.price.step_seconds) best = {p, price, ""};
    }
  p.micro_batch = asked, p.micro_batches = sequences_per_replica / asked, p.vpp = chunks;
  if (best.price.step_seconds > 1e29) best.why = model.why_invalid(p);
  if (best.why.empty()) best.why = "no micro-batch divides and fits";
  return best;
}

/// The columns of a GPT's architecture, of one name in all tables but vTrain's.
struct Shape {
  std::string layers = "layers", hidden = "hidden", heads = "heads", sequence = "seq";
};
ModelSpec gpt_of(CellReader& cells, const Shape& names, std::int64_t vocab) {
  const std::int64_t layers = cells.count(names.layers, 1, 4096), hidden = cells.count(names.hidden),
                     heads = cells.count(names.heads);
  cells.share(names.hidden, hidden, {heads});
  return gpt_model(layers, hidden, heads, vocab, cells.count(names.sequence));
}

TrainSetting mixed_precision(std::int64_t sequence) { return {.sequence = sequence, .state = {2, 4, 4, 8}}; }

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
    const TrainPrice price = price_of(cells, model, p);
    if (!cells.usable()) {
      table.skipped.push_back({label, cells.why()});
      continue;
    }
    const TrainModel::Layers l = model.layers(p);
    const double gib = 1024.0 * 1024.0 * 1024.0, layers = static_cast<double>(gpt.layers);
    const auto kept_of = [&](const TrainPoint& q, const LayerCost& c) {
      const double each = q.recompute == Recompute::full        ? c.kept_full_bytes
                          : q.recompute == Recompute::selective ? c.kept_selective_bytes
                                                                : c.kept_bytes;
      // Interleaved 1F1B on the first stage: 2 (pp - 1) + (vpp - 1) pp + 1 chunks of L / (pp vpp) layers.
      const double chunks = static_cast<double>(q.vpp > 1 ? 2 * (q.pp - 1) + (q.vpp - 1) * q.pp + 1 : q.pp * q.vpp);
      return each * layers * chunks / static_cast<double>(q.pp * q.vpp);
    };
    double predicted = 0.0;
    if (quantity == "iter_time") {
      predicted = price.step_seconds;
    } else if (quantity == "layer_forward") {
      predicted = 1e3 * (l.dense.forward + l.dense.tensor_forward);
    } else if (quantity == "layer_backward") {
      double seconds =
          l.dense.backward + l.dense.tensor_backward - (frame->overlap_tensor ? l.dense.hidden_tensor : 0.0);
      if (p.recompute == Recompute::full) seconds += l.dense.forward + l.dense.tensor_forward;
      if (p.recompute == Recompute::selective) seconds += l.dense.recompute_core;
      predicted = 1e3 * seconds;
    } else if (quantity == "activation_mem") {
      predicted = kept_of(p, l.dense) / gib;
    } else if (quantity == "param+opt_mem") {
      const StateBytes& b = model.setting().state;
      const double each = b.params + b.grads + b.master + b.moments;
      predicted = each * l.dense.parameters * layers / static_cast<double>(p.pp) / gib;
    } else if (quantity == "activation_percent_of_baseline") {
      TrainPoint base = p;
      base.sp = false;
      base.recompute = Recompute::none;
      predicted = 100.0 * kept_of(p, l.dense) / kept_of(base, model.dense_layer(base));
    } else {
      // The paper's hardware FLOPs add what is recomputed to the model's 3 passes.
      const double sequences = static_cast<double>(p.dp * p.micro_batch * p.micro_batches),
                   s = static_cast<double>(gpt.max_position), h = static_cast<double>(gpt.hidden);
      const bool again = quantity == "hfu" && p.recompute == Recompute::full;
      double flops = megatron_flops(gpt, sequences, s, again ? 4.0 : 3.0);
      if (quantity == "hfu" && p.recompute == Recompute::selective) flops += 4.0 * sequences * s * s * h * layers;
      const double peak = cost->peak_flops(DType::bf16) * static_cast<double>(p.ranks());
      predicted = 100.0 * flops / peak / price.step_seconds;
    }
    put(table, label, cells, "value", predicted);
  }
  return std::vector<ValidationTable>{iteration, layer, kept, states, share, use};
}

namespace {

/// What the authors' script of table 1 says of each model: Megatron-LM, examples/academic_paper_scripts/sc21/
/// run_table_1.sh. Chunks: layers / pp / --num-layers-per-virtual-pipeline-stage.
struct ScriptedRun {
  std::int64_t layers, hidden, micro_batch, chunks;
};
constexpr ScriptedRun sc21_table_1[] = {{24, 2304, 16, 1},  {30, 3072, 16, 1}, {36, 4096, 16, 1}, {40, 6144, 8, 1},
                                        {48, 8192, 4, 1},   {60, 10240, 2, 3}, {80, 12288, 2, 2}, {96, 16384, 1, 2},
                                        {105, 20480, 1, 3}, {128, 25600, 1, 1}};

const ScriptedRun* scripted(const ModelSpec& m) {
  for (const ScriptedRun& run : sc21_table_1)
    if (run.layers == m.layers && run.hidden == m.hidden) return &run;
  return nullptr;
}

/// --fp16 without --accumulate-allreduce-grads-in-fp32 (CONFIG.sh): gradients are added and reduced in fp16.
TrainSetting fp16_gradients(std::int64_t sequence) { return {.sequence = sequence, .state = {2, 2, 4, 8}}; }

/// The scripts say --DDP-impl torch without a pipeline, which reduces beside backward, and local with one, which
/// reduces behind it.
FrameworkProfile sc21_frame(FrameworkProfile frame, const TrainPoint& p) {
  frame.overlap_grad_reduce = p.pp == 1;
  return frame;
}

}  // namespace

TableResult validate_sc21_scaling(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"megatron_sc21_weak_scaling",
                      "TFLOP/s per GPU",
                      "TFLOP/s",
                      "profile megatron-sc21, fp16 gradients, full recomputation, 4 passes counted as in the paper; "
                      "micro-batch and interleaving of the authors' script (run_table_1.sh), of other models the "
                      "fastest that fits",
                      {},
                      {},
                      {}};
  if (auto has = csv.require({"heads", "hidden", "layers", "TP", "PP", "GPUs", "global_batch", "TFLOPs_per_GPU", "seq",
                              "vocab", "hardware"});
      !has)
    return fail(has.error());
  auto frame = context.framework("megatron-sc21");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::int64_t gpus = cells.count("GPUs"), seq = cells.count("seq");
    auto cost = context.cost(context.gpu_named(cells, cells.text("hardware")), gpus);
    if (!cost) return fail(cost.error());
    const ModelSpec gpt = gpt_of(cells, {}, cells.count("vocab"));
    TrainPoint p{.tp = cells.count("TP"),
                 .pp = cells.count("PP"),
                 .sharding = Sharding::replicated,
                 .recompute = Recompute::full};
    p.dp = cells.share("GPUs", gpus, {p.tp, p.pp});
    const TrainModel model(gpt, fp16_gradients(seq), *cost, sc21_frame(*frame, p));
    const std::int64_t batch = cells.count("global_batch"), replica = cells.share("sequences", batch, {p.dp});
    const std::string label = fmt::format("{}B tp{} pp{} on {}", cells.text("params_B"), p.tp, p.pp, gpus);
    const ScriptedRun* run = scripted(gpt);
    if (run) p.micro_batch = run->micro_batch, p.vpp = run->chunks;
    Choice best = fastest(cells, model, p, replica, run ? 1e30 : 80e9, !run, !run);
    if (run && best.price.step_seconds > 1e29) best = fastest(cells, model, p, replica, 80e9, true, true);
    if (best.price.step_seconds > 1e29) cells.refuse(best.why);
    const double flops = megatron_flops(gpt, static_cast<double>(batch), static_cast<double>(seq), 4.0);
    put(out, fmt::format("{} (mb {}, vpp {})", label, best.point.micro_batch, best.point.vpp), cells, "TFLOPs_per_GPU",
        flops / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_sc21_zero3(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "megatron_sc21_zero3_vs_ptd",
      "TFLOP/s per GPU",
      "TFLOP/s",
      "full recomputation, fp16 gradients; ZeRO-3 with profile deepspeed-zero3, PTD with megatron-sc21: tp 8, "
      "pp = model parallel / 8, interleaving not stated: none",
      {},
      {},
      {}};
  if (auto has = csv.require(
          {"scheme", "params_B", "model_parallel", "global_batch", "GPUs", "micro_batch", "TFLOPs_per_GPU"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const bool zero = cells.text("scheme") == "ZeRO-3";
    if (!zero && cells.text("scheme") != "PTD")
      cells.refuse(fmt::format("scheme '{}' is neither ZeRO-3 nor PTD", cells.text("scheme")));
    auto frame = context.framework(zero ? "deepspeed-zero3" : "megatron-sc21");
    if (!frame) return fail(frame.error());
    const std::int64_t gpus = cells.count("GPUs"), batch = cells.count("global_batch");
    auto cost = context.cost("a100-sxm-80gb", gpus);
    if (!cost) return fail(cost.error());
    // The two models of the table: 174.6B = 96 x 12288, 529.6B = 105 x 20480 (SC'21, table 1).
    const bool small = cells.text("params_B").rfind("174.6", 0) == 0;
    if (!small && cells.text("params_B").rfind("529.6", 0) != 0)
      cells.refuse(fmt::format("{}B parameters are neither of the table's two models", cells.text("params_B")));
    const ModelSpec gpt = small ? gpt_model(96, 12288, 96, 51200, 2048) : gpt_model(105, 20480, 128, 51200, 2048);
    TrainPoint p{.recompute = Recompute::full, .micro_batch = cells.count("micro_batch")};
    p.sharding = zero ? Sharding::zero3 : Sharding::replicated;
    const std::int64_t ways = cells.count("model_parallel");
    if (zero && ways > 1) cells.refuse("ZeRO-3 with model parallelism: the table does not say of which kind");
    if (!zero) p.tp = 8, p.pp = cells.share("model-parallel ranks", ways, {8});
    p.dp = cells.share("GPUs", gpus, {p.tp, p.pp});
    const TrainModel model(gpt, fp16_gradients(2048), *cost, zero ? *frame : sc21_frame(*frame, p));
    const std::string label = fmt::format("{} {}B on {}", cells.text("scheme"), cells.text("params_B"), gpus);
    // Where the global batch does not divide, the published one is what ran: whole micro-batches, at least one.
    const std::int64_t replica = std::max<std::int64_t>(p.micro_batch, batch / p.dp / p.micro_batch * p.micro_batch);
    const Choice best = fastest(cells, model, p, replica, 1e30, false, false);
    if (best.price.step_seconds > 1e29) cells.refuse(best.why);
    const double flops = megatron_flops(gpt, static_cast<double>(replica * p.dp), 2048, 4.0);
    put(out, label, cells, "TFLOPs_per_GPU", flops / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_megatron_h100(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"megatron_readme_h100",
                      "TFLOP/s per GPU",
                      "TFLOP/s",
                      "profile megatron-h100: fused attention, bf16, distributed optimizer, overlapped; SP with TP; "
                      "micro-batch and interleaving not stated: the fastest that fits",
                      {},
                      {},
                      {}};
  if (auto has = csv.require({"heads", "hidden", "layers", "TP", "PP", "DP", "GPUs", "global_batch", "TFLOPs_per_GPU",
                              "seq", "vocab", "hardware"});
      !has)
    return fail(has.error());
  auto frame = context.framework("megatron-h100");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::int64_t gpus = cells.count("GPUs"), seq = cells.count("seq"), batch = cells.count("global_batch");
    const std::string gpu = context.gpu_named(cells, cells.text("hardware"));
    auto cost = context.cost(gpu, gpus);
    if (!cost) return fail(cost.error());
    const ModelSpec gpt = gpt_of(cells, {}, cells.count("vocab"));
    const TrainModel model(gpt, mixed_precision(seq), *cost, *frame);
    TrainPoint p{.dp = cells.count("DP"), .tp = cells.count("TP"), .pp = cells.count("PP")};
    cells.layout(gpus, {p.dp, p.tp, p.pp});
    p.sp = p.tp > 1;
    const std::string label = fmt::format("{}B tp{} pp{} on {}", cells.text("params_B"), p.tp, p.pp, gpus);
    const std::int64_t replica = cells.share("sequences", batch, {p.dp});
    Choice best = fastest(cells, model, p, replica, context.memory_bytes(gpu), true, true);
    if (best.price.step_seconds > 1e29) {
      p.recompute = Recompute::selective;
      best = fastest(cells, model, p, replica, 1e30, true, true);
    }
    if (best.price.step_seconds > 1e29) cells.refuse(best.why);
    const double flops = megatron_flops(gpt, static_cast<double>(batch), static_cast<double>(seq), 3.0);
    put(out, fmt::format("{} (mb {}, vpp {})", label, best.point.micro_batch, best.point.vpp), cells, "TFLOPs_per_GPU",
        flops / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_llama3_405b(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"llama3_405b",
                      "TFLOP/s per GPU",
                      "TFLOP/s",
                      "profile megatron-h100; ZeRO-1, SP with TP, micro-batch 1, fastest interleaving",
                      {},
                      {},
                      {}};
  if (auto has =
          csv.require({"GPUs", "TP", "CP", "PP", "DP", "seq", "batch_per_DP", "TFLOPs_per_GPU", "hardware", "model"});
      !has)
    return fail(has.error());
  auto frame = context.framework("megatron-h100");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::int64_t gpus = cells.count("GPUs"), seq = cells.count("seq");
    auto cost = context.cost(context.gpu_named(cells, cells.text("hardware")), gpus);
    auto llama = context.model(context.model_named(cells, cells.text("model")));
    if (!cost) return fail(cost.error());
    if (!llama) return fail(llama.error());
    const TrainModel model(*llama, mixed_precision(seq), *cost, *frame);
    TrainPoint p{
        .dp = cells.count("DP"), .cp = cells.count_or_one("CP"), .tp = cells.count("TP"), .pp = cells.count("PP")};
    cells.layout(gpus, {p.dp, p.cp, p.tp, p.pp});
    p.sp = p.tp > 1;
    const std::int64_t batch = cells.count("batch_per_DP");
    // 126 layers and the ends divide by 16 stages only together: stages of equal chunks, embedding and head one each.
    const Choice best = fastest(cells, model, p, batch, 1e30, false, true);
    p.micro_batches = batch;
    if (best.price.step_seconds > 1e29) cells.refuse(best.why);
    const double tokens = static_cast<double>(batch) * static_cast<double>(p.dp) * static_cast<double>(seq);
    put(out, fmt::format("405B tp{} cp{} pp{} on {} (vpp {})", p.tp, p.cp, p.pp, gpus, best.point.vpp), cells,
        "TFLOPs_per_GPU", model.model_flops(tokens) / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_megascale(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "megascale_175b",
      "iteration time",
      "s",
      "profile megatron-a100 (Megatron-LM at 285068c, without --use-flash-attn: the paper counts FlashAttention "
      "among its own operators), 175B = 96 x 12288, tp 8 pp 8 vpp 6 (as the paper states), SP, selective "
      "recomputation, micro-batch 1, sequence 2048, vocabulary 64000",
      {},
      {},
      {}};
  if (auto has = csv.require({"system", "GPUs", "batch", "iter_s", "model"}); !has) return fail(has.error());
  auto frame = context.framework("megatron-a100");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::int64_t gpus = cells.count("GPUs"), batch = cells.count("batch");
    auto cost = context.cost("a100-sxm-80gb", gpus);
    if (!cost) return fail(cost.error());
    const TrainModel model(gpt_model(96, 12288, 128, 64000, 2048), mixed_precision(2048), *cost, *frame);
    TrainPoint p{.tp = 8, .pp = 8, .vpp = 6, .sp = true, .recompute = Recompute::selective};
    p.dp = cells.share("GPUs", gpus, {p.tp, p.pp});
    p.micro_batches = cells.share("sequences", batch, {p.dp});
    if (p.micro_batches % p.pp != 0) p.vpp = 1;
    const TrainPrice price = price_of(cells, model, p);
    put(out, fmt::format("175B on {}, batch {} (vpp {})", gpus, batch, p.vpp), cells, "iter_s", price.step_seconds);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_vtrain(const CsvTable& csv, ValidationContext& context, const std::string& name) {
  const bool multi = name.find("multi") != std::string::npos;
  ValidationTable out{
      name,
      "iteration time",
      "ms",
      multi
          ? "profile megatron-vtrain, full recomputation, gradients all-reduced (no ZeRO), vocabulary 51200, 800 Gb/s "
            "per node"
          : "profile megatron-vtrain, no recomputation, gradients all-reduced (no ZeRO), vocabulary 51200",
      {},
      {},
      multi ? std::vector<PeerFigure>{{"vTrain", 0.1473, -1.0}, {"Calculon", 0.197, -1.0}}
            : std::vector<PeerFigure>{{"vTrain", 0.0837, -1.0}, {"Calculon", 0.39, 0.55}}};
  const char* gpu_column = csv.has("# GPUs") ? "# GPUs" : "GPUs";
  if (auto has = csv.require({gpu_column, "global batch", "micro batch", "hidden size", "attention heads", "# layers",
                              "sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism",
                              "iteration time (ms)"});
      !has)
    return fail(has.error());
  auto frame = context.framework("megatron-vtrain");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::int64_t gpus = cells.count(gpu_column), batch = cells.count("global batch");
    auto cost = context.cost("a100-sxm-80gb", gpus, 12.5e9);
    if (!cost) return fail(cost.error());
    const ModelSpec gpt = gpt_of(cells, {"# layers", "hidden size", "attention heads", "sequence length"}, 51200);
    const TrainModel model(gpt, mixed_precision(gpt.max_position), *cost, *frame);
    TrainPoint p{.dp = cells.count("data parallelism"),
                 .tp = cells.count("tensor parallelism"),
                 .pp = cells.count("pipeline parallelism")};
    cells.layout(gpus, {p.dp, p.tp, p.pp});
    p.sharding = Sharding::replicated;
    p.recompute = multi ? Recompute::full : Recompute::none;
    p.micro_batch = cells.count("micro batch");
    const std::string label = fmt::format("{}x{} tp{} dp{} pp{} mb{} batch {} on {}", gpt.layers, gpt.hidden, p.tp,
                                          p.dp, p.pp, p.micro_batch, batch, gpus);
    p.micro_batches = cells.share("sequences", batch, {p.dp, p.micro_batch});
    const TrainPrice price = price_of(cells, model, p);
    put(out, label, cells, "iteration time (ms)", 1e3 * price.step_seconds);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
