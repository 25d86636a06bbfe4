// GPT-3-like training on A100 and H100: SC'21, Megatron's README, Llama 3, MegaScale's baseline, vTrain.
#include <fmt/format.h>

#include <algorithm>

#include "planner/validate/validate_gpt.h"

namespace hotbunk {
namespace {

/// What the authors' script of table 1 says of each run: Megatron-LM, examples/academic_paper_scripts/sc21/
/// run_table_1.sh. Chunks: layers / pp / --num-layers-per-virtual-pipeline-stage.
struct ScriptedRun {
  std::int64_t layers, hidden, tp, pp, gpus, batch, micro_batch, chunks;
};
constexpr ScriptedRun sc21_table_1[] = {{24, 2304, 1, 1, 32, 512, 16, 1},      {30, 3072, 2, 1, 64, 512, 16, 1},
                                        {36, 4096, 4, 1, 128, 512, 16, 1},     {40, 6144, 8, 1, 256, 1024, 8, 1},
                                        {48, 8192, 8, 2, 512, 1536, 4, 1},     {60, 10240, 8, 4, 1024, 1792, 2, 3},
                                        {80, 12288, 8, 8, 1536, 2304, 2, 2},   {96, 16384, 8, 16, 1920, 2160, 1, 2},
                                        {105, 20480, 8, 35, 2520, 2520, 1, 3}, {128, 25600, 8, 64, 3072, 3072, 1, 1}};

/// A micro-batch was chosen for a layout and a batch: of another of either, the script says nothing.
const ScriptedRun* scripted(const ModelSpec& m, const TrainPoint& p, std::int64_t gpus, std::int64_t batch) {
  for (const ScriptedRun& run : sc21_table_1)
    if (run.layers == m.layers && run.hidden == m.hidden && run.tp == p.tp && run.pp == p.pp && run.gpus == gpus &&
        run.batch == batch)
      return &run;
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

/// Refuses a row for which there is nothing to choose; else notes what was.
void choose(CellReader& cells, ValidationContext& context, const TrainModel& model, const Choice& best) {
  if (best.price.step_seconds > 1e29) cells.refuse(best.why);
  else if (cells.usable()) context.trained.push_back({model, best.point});
}

/// A row that gives TFLOP/s per GPU, counted as `flops` of a step; the label says what was chosen for it.
void put_rate(ValidationTable& out, CellReader& cells, const std::string& label, const Choice& best, double flops,
              std::int64_t gpus) {
  put(out, fmt::format("{} (mb {}, vpp {})", label, best.point.micro_batch, best.point.vpp), cells, "TFLOPs_per_GPU",
      flops / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
}

}  // namespace

TableResult validate_sc21_scaling(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{"megatron_sc21_weak_scaling",
                      "TFLOP/s per GPU",
                      "TFLOP/s",
                      "profile megatron-sc21, fp16 gradients, full recomputation, 4 passes counted as in the paper; "
                      "micro-batch and interleaving of the authors' script (run_table_1.sh), of other models, layouts "
                      "and batches the fastest that fits",
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
    const ScriptedRun* run = scripted(gpt, p, gpus, batch);
    if (run) p.micro_batch = run->micro_batch, p.vpp = run->chunks;
    Choice best = fastest(cells, model, p, replica, run ? 1e30 : 80e9, !run, !run);
    if (run && best.price.step_seconds > 1e29) best = fastest(cells, model, p, replica, 80e9, true, true);
    choose(cells, context, model, best);
    put_rate(out, cells, label, best, megatron_flops(gpt, static_cast<double>(batch), static_cast<double>(seq), 4.0),
             gpus);
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
    choose(cells, context, model, best);
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
    choose(cells, context, model, best);
    put_rate(out, cells, label, best, megatron_flops(gpt, static_cast<double>(batch), static_cast<double>(seq), 3.0),
             gpus);
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
    choose(cells, context, model, best);
    const double tokens = static_cast<double>(batch) * static_cast<double>(p.dp) * static_cast<double>(seq);
    put(out,
        fmt::format("{} tp{} cp{} pp{} on {} (vpp {})", cells.text("model"), p.tp, p.cp, p.pp, gpus, best.point.vpp),
        cells, "TFLOPs_per_GPU",
        model.model_flops(tokens) / best.price.step_seconds / static_cast<double>(gpus) / 1e12);
  }
  return std::vector<ValidationTable>{out};
}

TableResult validate_megascale(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "megascale_175b",
      "iteration time",
      "s",
      "profile megatron-a100 (Megatron-LM at 285068c, without --use-flash-attn: the paper counts FlashAttention "
      "among its own operators), 175B = 96 x 12288 in 6 chunks a stage, 530B = 105 x 20480 in 3 (the paper's table 1), "
      "SP, selective recomputation, micro-batch 1, sequence 2048, vocabulary 64000",
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
    if (cells.text("system") != "Megatron-LM")
      cells.refuse(fmt::format("system '{}': no profile has its own operators, overlap and model changes",
                               cells.text("system")));
    const std::string& named = cells.text("model");
    const std::size_t size = named.find(' ');
    const bool small = named.substr(0, size) == "175B";
    if (!small && named.substr(0, size) != "530B")
      cells.refuse(fmt::format("model '{}' is neither 175B nor 530B", named));
    const ModelSpec gpt = small ? gpt_model(96, 12288, 128, 64000, 2048) : gpt_model(105, 20480, 160, 64000, 2048);
    const TrainModel model(gpt, mixed_precision(2048), *cost, *frame);
    TrainPoint p{.tp = 8, .pp = small ? 8 : 35, .vpp = small ? 6 : 3, .recompute = Recompute::selective};
    if (size != std::string::npos) {
      const auto by = degrees(cells, named.substr(size + 1));
      for (const auto& [name, sizes] : by)
        if (name == "TP") p.tp = sizes[0];
        else if (name == "PP") p.pp = sizes[0];
        else cells.refuse(fmt::format("model '{}' names more than TP and PP", named));
    }
    p.sp = p.tp > 1;
    p.dp = cells.share("GPUs", gpus, {p.tp, p.pp});
    p.micro_batches = cells.share("sequences", batch, {p.dp});
    if (p.micro_batches % p.pp != 0) p.vpp = 1;
    const TrainPrice price = price_of(cells, context, model, p);
    put(out, fmt::format("{} on {}, batch {} (vpp {})", named, gpus, batch, p.vpp), cells, "iter_s",
        price.step_seconds);
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
    const TrainPrice price = price_of(cells, context, model, p);
    put(out, label, cells, "iteration time (ms)", 1e3 * price.step_seconds);
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
