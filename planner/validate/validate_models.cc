// Llama, Qwen and DeepSeek on recent GPUs: SimuMax's B200 rows, torchtitan, Megatron-Bridge.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/format.h"
#include "planner/allocator/allocator_replay.h"
#include "planner/validate/validate_tables.h"

namespace hotbunk {
namespace {

Recompute recompute_named(CellReader& cells, const std::string& cell) {
  if (cell == "full") return Recompute::full;
  if (cell == "selective") return Recompute::selective;
  if (cell != "none") cells.refuse(fmt::format("recomputation '{}' is none, selective or full", cell));
  return Recompute::none;
}

TrainPoint simumax_point(CellReader& cells) {
  TrainPoint p{.dp = cells.count("dp"),
               .cp = cells.count("cp"),
               .tp = cells.count("tp"),
               .pp = cells.count("pp"),
               .ep = cells.count("ep")};
  cells.layout(cells.count("gpus"), {p.dp, p.cp, p.tp, p.pp});
  p.sp = cells.count("sequence_parallel", 0, 1) == 1 && p.tp > 1;
  constexpr Sharding stages[] = {Sharding::replicated, Sharding::zero1, Sharding::zero2, Sharding::zero3};
  p.sharding = stages[cells.count("zero", 0, 3)];
  p.recompute = recompute_named(cells, cells.text("recompute"));
  p.micro_batch = cells.count("micro_batch_size");
  p.micro_batches = cells.count("num_micro_batches", 1, 4096);
  return p;
}

/// A pipeline schedule by PyTorch's name for it, taken out of the text; one that holds two stages a rank has two
/// chunks.
struct Schedule {
  PipelineSchedule order = PipelineSchedule::one_f_one_b;
  std::int64_t chunks = 1;
};
Schedule schedule_in(std::string& parallelism) {
  struct Word {
    const char* name;
    Schedule schedule;
  };
  // ZBV's chunks make a V, so that the last stage is the first rank's: priced as ZB-H1, which has its memory.
  static const Word words[] = {{"Interleaved1F1B", {PipelineSchedule::one_f_one_b, 2}},
                               {"Interleaved 1F1B", {PipelineSchedule::one_f_one_b, 2}},
                               {"ZBVZeroBubble", {PipelineSchedule::zero_bubble, 1}},
                               {"ZBV", {PipelineSchedule::zero_bubble, 1}},
                               {"GPipe", {PipelineSchedule::gpipe, 1}},
                               {"1F1B", {}}};
  for (const Word& word : words)
    if (const auto at = parallelism.find(word.name); at != std::string::npos) {
      parallelism.erase(at, std::string(word.name).size());
      if (at > 0 && at == parallelism.size()) parallelism.erase(parallelism.find_last_not_of(" ,") + 1);
      return word.schedule;
    }
  return {};
}

/// A layout of torchtitan, of what `parallelism` says without the schedule. With a pipeline there are as many
/// micro-batches as stages, two of which a rank has where it has chunks, and units stay gathered (its defaults of
/// December 2024: pipeline_parallel_microbatches, pipelining_utils.py, reshard_after_forward).
TrainPoint torchtitan_point(CellReader& cells, const std::string& parallelism, const Schedule& schedule) {
  auto by = degrees(cells, parallelism);
  TrainPoint p{.vpp = schedule.chunks, .sharding = Sharding::fsdp, .schedule = schedule.order};
  for (const auto& [name, sizes] : by) {
    std::int64_t* const own = name == "TP" ? &p.tp : name == "CP" ? &p.cp : name == "PP" ? &p.pp : &p.dp;
    const bool data = own == &p.dp, hybrid = name == "HSDP";
    if ((data && name != "FSDP" && name != "DDP" && !hybrid) || sizes.size() != (hybrid ? 2 : 1))
      cells.refuse(fmt::format("parallelism '{}' is not understood", cells.text("parallelism")));
    *own = sizes[0] * (hybrid && sizes.size() == 2 ? sizes[1] : 1);
    if (*own < 1) cells.refuse(fmt::format("{} of 0 ranks", name));
    *own = std::max<std::int64_t>(*own, 1);
    if (name == "DDP") p.sharding = Sharding::replicated;
  }
  const std::int64_t gpus = cells.count("GPUs");
  if (!by.contains("FSDP") && !by.contains("HSDP") && !by.contains("DDP"))
    p.dp = cells.share("GPUs", gpus, {p.cp, p.tp, p.pp});
  if (by.contains("HSDP") && by["HSDP"].size() == 2) p.fsdp = std::max<std::int64_t>(1, by["HSDP"][1]) * p.cp;
  cells.layout(gpus, {p.dp, p.cp, p.tp, p.pp});
  p.sp = p.tp > 1;
  p.recompute = recompute_named(cells, cells.text("AC"));
  p.reshard_after_forward = p.pp == 1;
  const std::int64_t local = cells.count("local_batch");
  if (schedule.chunks > 1 && p.pp == 1) cells.refuse("an interleaved schedule without a pipeline");
  p.micro_batches = p.pp * schedule.chunks;
  p.micro_batch = cells.share("local sequences", local, {p.pp, schedule.chunks});
  // A global batch of several local ones is accumulated.
  if (!cells.text("global_batch").empty())
    p.micro_batches *= cells.share("sequences", cells.count("global_batch"), {p.dp, local});
  return p;
}

}  // namespace

TableResult validate_simumax(const CsvTable& csv, ValidationContext& context) {
  const char* setting = "profile megatron-te: Transformer Engine 2.11, distributed optimizer, nothing overlapped";
  ValidationTable time{"simumax_b200", "iteration time", "ms", setting, {}, {}, {}};
  ValidationTable memory{"simumax_b200_memory", "allocated memory, fullest stage", "GiB", setting, {}, {}, {}};
  ValidationTable ends{"simumax_b200_stages", "allocated memory, first stage", "GiB", setting, {}, {}, {}};
  ValidationTable reserved{"simumax_b200_reserved",
                           "reserved memory, fullest stage",
                           "GiB",
                           "the step's tensors in order through the caching allocator "
                           "(planner/allocator/allocator_replay.h); nothing fitted",
                           {},
                           {},
                           {}};
  ValidationTable peer_time = time, peer_memory = memory;
  if (auto has = csv.require({"model",
                              "layers",
                              "dense_layers",
                              "gpus",
                              "tp",
                              "cp",
                              "pp",
                              "dp",
                              "ep",
                              "micro_batch_size",
                              "num_micro_batches",
                              "seq",
                              "zero",
                              "sequence_parallel",
                              "recompute",
                              "grad_dtype",
                              "cross_entropy_fused",
                              "comm_overlap",
                              "measured_ms",
                              "measured_alloc_gib_max",
                              "measured_alloc_gib_first_stage",
                              "measured_reserved_gib_max"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string label = cells.text("case");
    auto model = context.model(context.model_named(cells, cells.text("model")));
    auto cost = context.cost("b200-sxm-180gb", cells.count("gpus"));
    const bool overlap = cells.count("comm_overlap", 0, 1) == 1;
    auto frame = context.framework(overlap ? "megatron-te-overlap" : "megatron-te");
    if (!model) return fail(model.error());
    if (!cost) return fail(cost.error());
    if (!frame) return fail(frame.error());
    const TrainPoint p = simumax_point(cells);
    model->layers = cells.count("layers", 1, 1024);
    // Of a model without experts every layer is dense, whatever the cell counts.
    if (model->moe) model->moe->first_dense_layers = cells.count("dense_layers", 0, model->layers);
    TrainSetting half{.sequence = cells.count("seq"), .state = {2, 4, 4, 8}};
    if (cells.text("grad_dtype") == "bf16") half.state.grads = 2;
    else if (cells.text("grad_dtype") != "fp32") cells.refuse("grad_dtype is neither fp32 nor bf16");
    if (cells.count("cross_entropy_fused", 0, 1) != 1)
      cells.refuse("the copies of the logits under an unfused cross-entropy are not known");
    const TrainModel trained(*model, half, *cost, *frame);
    const TrainPrice price = price_of(cells, context, trained, p);
    put(time, label, cells, "measured_ms", 1e3 * price.step_seconds);
    put(memory, label, cells, "measured_alloc_gib_max", price.peak_bytes / gib);
    const double held = cells.usable() ? static_cast<double>(replay_step(trained, p).reserved) : 0.0;
    put(reserved, label, cells, "measured_reserved_gib_max", held / gib);
    put(peer_time, label, cells, "measured_ms", csv.row(i).number("simumax_ms"));
    put(peer_memory, label, cells, "measured_alloc_gib_max", csv.row(i).number("simumax_alloc_gib"));
    if (p.pp == 1) cells.refuse("one stage: it is the fullest");
    put(ends, label, cells, "measured_alloc_gib_first_stage", price.first_stage_bytes / gib);
  }
  if (!peer_time.rows.empty()) time.peers = {{"SimuMax", peer_time.mean_abs_error(), peer_time.max_abs_error()}};
  if (!peer_memory.rows.empty())
    memory.peers = {{"SimuMax", peer_memory.mean_abs_error(), peer_memory.max_abs_error()}};
  return std::vector<ValidationTable>{time, memory, ends, reserved};
}

TableResult validate_torchtitan(const CsvTable& csv, ValidationContext& context) {
  const std::string setting =
      "profiles torchtitan and torchtitan-compile: FSDP2, fp32 parameters and gradients reduced in "
      "fp32, selective checkpointing of every second matrix product";
  const std::string narrow = setting + "; layers' products in float8 from the datasheet, uncalibrated";
  ValidationTable rate{"torchtitan", "tokens per second and GPU", "tokens/s", setting, {}, {}, {}};
  ValidationTable memory{"torchtitan_memory", "reserved memory", "GiB", setting, {}, {}, {}};
  ValidationTable rate8{"torchtitan_float8", "tokens per second and GPU", "tokens/s", narrow, {}, {}, {}};
  ValidationTable memory8{"torchtitan_float8_memory", "reserved memory", "GiB", narrow, {}, {}, {}};
  if (auto has = csv.require({"model", "GPUs", "parallelism", "precision", "seq", "local_batch", "AC", "TPS_per_GPU",
                              "global_batch", "mem_GiB", "hardware"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string how = cells.text("precision");
    const std::string label =
        fmt::format("{} {} on {} {}", cells.text("model"), cells.text("parallelism"), cells.text("GPUs"), how);
    const bool compiled = how.find("compile") != std::string::npos;
    const bool float8 = how.find("float8") != std::string::npos;
    if (!float8 && how.find("bf16") == std::string::npos)
      cells.refuse(fmt::format("precision '{}' is neither bf16 nor float8", how));
    if (fmt::format("{} {}", cells.text("parallelism"), how).find("sync") != std::string::npos)
      cells.refuse("asynchronous tensor parallelism: no profile cuts products to run beside their own collectives");
    auto frame = context.framework(compiled ? "torchtitan-compile" : "torchtitan");
    auto model = context.model(context.model_named(cells, cells.text("model")));
    const std::string gpu = context.gpu_named(cells, cells.text("hardware"));
    const bool capped = cells.text("hardware").find("500W") != std::string::npos;
    auto cost = context.cost(gpu, cells.count("GPUs"), 0.0, capped ? "h100-96gb-500w" : "");
    if (!frame) return fail(frame.error());
    if (!model) return fail(model.error());
    if (!cost) return fail(cost.error());
    const bool rated = !float8 || cost->peak_flops("fp8") > 0.0;
    if (!rated) cells.refuse(fmt::format("{} has no fp8 products", gpu));
    std::string parallelism = cells.text("parallelism");
    const Schedule schedule = schedule_in(parallelism);
    const TrainModel trained(
        *model, {.sequence = cells.count("seq"), .precision = float8 && rated ? "fp8" : "bf16", .state = {2, 4, 4, 8}},
        *cost, *frame);
    const TrainPoint p = torchtitan_point(cells, parallelism, schedule);
    const TrainPrice price = price_of(cells, context, trained, p);
    // Every row is in either pair of tables; the other says which.
    CellReader calibrated = cells, uncalibrated = cells;
    if (float8) calibrated.refuse("float8: in torchtitan_float8");
    else uncalibrated.refuse("bf16: in torchtitan");
    const double tokens = price.tokens / price.step_seconds / static_cast<double>(p.ranks());
    // torchtitan's "memory" is torch.cuda's max_memory_reserved (torchtitan/components/metrics.py).
    const double reserved = cells.usable() ? static_cast<double>(replay_step(trained, p).reserved) : 0.0;
    put(rate, label, calibrated, "TPS_per_GPU", tokens);
    put(memory, label, calibrated, "mem_GiB", reserved / gib);
    put(rate8, label, uncalibrated, "TPS_per_GPU", tokens);
    put(memory8, label, uncalibrated, "mem_GiB", reserved / gib);
  }
  return std::vector<ValidationTable>{rate, memory, rate8, memory8};
}

}  // namespace hotbunk
