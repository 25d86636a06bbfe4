// Megatron-Bridge's performance summary: recent models, mostly in FP8, MXFP8 and NVFP4, on H100 to GB300. What its
// table does not state is taken from the recipes that it publishes (src/megatron/bridge/perf_recipes), by rules:
//   gradients are reduced in bf16 (grad_reduce_in_fp32 = False);
//   dense models without tp and pp are Megatron-FSDP, with activations offloaded beside compute;
//   single modules are recomputed at most: mla_up_proj, the most frequent one, of models that have it;
//   from release 26.06 on, MoE models in formats with block scales (MXFP8, NVFP4) run whole iterations as CUDA graphs
//   and overlap the experts' exchange (deepseek_v3.py: _enable_deepseek_full_iteration in both, none of it in fp8_cs
//   and bf16).
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "planner/validate/validate_tables.h"

namespace hotbunk {
namespace {

/// The format of the layers' products by a source's word for the recipe, "" for none of ours. Current and delayed
/// scaling (CS, DS) differ by one pass over an operand; the former is priced.
std::string format_named(CellReader& cells, const std::string& cell) {
  static const std::map<std::string, std::string> formats = {{"BF16", "bf16"},   {"FP8", "fp8"},     {"FP8CS", "fp8"},
                                                             {"FP8DS", "fp8"},   {"FP8MX", "mxfp8"}, {"MXFP8", "mxfp8"},
                                                             {"NVFP4", "nvfp4"}, {"FP4", "nvfp4"}};
  const auto named = formats.find(letters_of(cell));
  if (named != formats.end()) return named->second;
  cells.refuse(letters_of(cell) == "FP8SC" ? "FP8 in blocks of 128 x 128 (sub-channel scales) is not priced"
                                           : fmt::format("precision '{}' is not known", cell));
  return "bf16";
}

/// Why a model has no price, "" where it may have one.
const char* unpriced(const std::string& model) {
  if (model.find("Nemotron") != std::string::npos) return "Mamba layers are not priced";
  if (model.find("DeepSeekV4") != std::string::npos) return "compressed sparse attention is not priced";
  if (letters_of(model) == "DEEPSEEKV32") return "sparse attention behind an indexer is not priced";
  for (const char* linear : {"Next", "Qwen3.5", "Qwen3_5", "Qwen35"})
    if (model.find(linear) != std::string::npos) return "linear attention is not priced";
  return "";
}

/// Keys that a token of a sequence of so many sees, on average over layers: all before it, or a window's.
double mean_keys_of(const ModelSpec& model, std::int64_t sequence) {
  double sum = 0.0;
  for (int layer = 0; layer < model.layers; ++layer) {
    const std::int64_t window = model.window_of(layer);
    // The first tokens see fewer: of n tokens under a window w, the first w see (w + 1) / 2.
    const double n = static_cast<double>(sequence), w = window > 0 ? std::min(static_cast<double>(window), n) : n;
    sum += (w * (w + 1.0) / 2.0 + (n - w) * w) / n;
  }
  return sum / static_cast<double>(model.layers);
}

TrainPoint point_of(CellReader& cells, const ModelSpec& model) {
  TrainPoint p{.cp = cells.count_or_one("cp"),
               .tp = cells.count_or_one("tp"),
               .pp = cells.count_or_one("pp"),
               .vpp = cells.count_or_one("vpp"),
               .ep = cells.count_or_one("ep")};
  p.dp = cells.share("GPUs", cells.count("gpus"), {p.cp, p.tp, p.pp});
  p.sp = p.tp > 1;
  p.recompute = Recompute::selective;  // of the modules that the profile names
  p.micro_batch = cells.count("mbs");
  p.micro_batches = cells.share("sequences", cells.count("gbs"), {p.dp, p.micro_batch});
  if (!model.moe && p.tp == 1 && p.pp == 1 && p.dp > 8) p.sharding = Sharding::fsdp;
  return p;
}

}  // namespace

TableResult validate_megatron_bridge(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "megatron_bridge",
      "tokens per second and GPU",
      "tokens/s",
      "profiles megatron-bridge and, for MoE models in MXFP8 and NVFP4 from 26.06 on, megatron-bridge-graphs; products "
      "in FP8, MXFP8 and NVFP4 from datasheets, uncalibrated; FSDP, recomputation and overlaps by the rules of the "
      "published recipes; of models with a vision tower the language model",
      {},
      {},
      {}};
  if (auto has = csv.require({"release", "task", "model", "system", "gpus", "precision", "gbs", "mbs", "seq", "tp",
                              "pp", "cp", "vpp", "ep", "tokens_per_s_per_gpu"});
      !has)
    return fail(has.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    CellReader cells(csv.row(i));
    const std::string label = fmt::format("{} {} {} {} {}", cells.text("release"), cells.text("task"),
                                          cells.text("model"), cells.text("system"), cells.text("precision"));
    if (const char* why = unpriced(cells.text("model")); *why) cells.refuse(why);
    std::string named = cells.text("model");
    if (const auto vision = named.find("_VL"); vision != std::string::npos) named.erase(vision, 3);
    if (letters_of(named) == "KIMIK25") named = "Kimi-K2";  // its language model
    auto model = context.model(context.model_named(cells, named));
    if (!model) return fail(model.error());
    // Fine-tuning of all weights is training; LoRA is not.
    const std::string& task = cells.text("task");
    if (task != "pre-training" && task != "sft")
      cells.refuse(fmt::format("task '{}'{}", task, task == "lora" ? ": frozen weights are not priced" : ""));
    const std::string gpu = context.gpu_named(cells, cells.text("system"));
    std::string format = format_named(cells, cells.text("precision"));
    const bool graphs = model->moe && (format == "mxfp8" || format == "nvfp4") && csv.row(i).number("release") >= 26.06;
    auto frame = context.framework(graphs ? "megatron-bridge-graphs" : "megatron-bridge");
    // Layouts in powers of two use 64 of the 72 GPUs of an NVL72 domain.
    const bool rack = gpu.find("nvl72") != std::string::npos,
               blackwell = gpu.find("b200") != std::string::npos || gpu.find("b300") != std::string::npos;
    const std::string profile = !blackwell ? "" : format == "bf16" ? "b200-sxm-180gb" : "blackwell-te";
    auto cost = context.cost(gpu, cells.count("gpus"), 0.0, profile, rack ? 64 : 8);
    if (!frame) return fail(frame.error());
    if (!cost) return fail(cost.error());
    if (cost->peak_flops(format) <= 0.0) {
      cells.refuse(fmt::format("{} has no {} products", gpu, format));
      format = "bf16";
    }
    TrainSetting setting{.sequence = cells.count("seq"), .precision = format, .state = {2, 2, 4, 8}};
    if (model->sliding_window > 0) setting.mean_keys = mean_keys_of(*model, setting.sequence);
    TrainPoint p = point_of(cells, *model);
    const TrainModel trained(*model, setting, *cost, *frame);
    // Interleaving of layers that do not divide: uneven chunks, priced without.
    if (cells.usable() && !trained.divides(p)) p.vpp = 1;
    const TrainPrice price = price_of(cells, context, trained, p);
    put(out, label, cells, "tokens_per_s_per_gpu", price.tokens / price.step_seconds / static_cast<double>(p.ranks()));
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
