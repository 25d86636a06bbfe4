// Llama, Qwen and DeepSeek on recent GPUs: SimuMax's B200 rows, torchtitan, Megatron-Bridge.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "planner/allocator_replay.h"
#include "planner/validate_tables.h"

namespace hotbunk {
namespace {

using Row = CsvTable::Row;
constexpr double gib = 1024.0 * 1024.0 * 1024.0;

/// "FSDP32 TP8" -> {FSDP: 32, TP: 8}.
std::map<std::string, std::int64_t> degrees(const std::string& text) {
  std::map<std::string, std::int64_t> out;
  std::string name, number;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ' ';
    if (c >= '0' && c <= '9') {
      number += c;
    } else if (c == ' ' || c == ',') {
      if (!name.empty()) out[name] = number.empty() ? 1 : std::stoll(number.substr(0, 9));
      name.clear();
      number.clear();
    } else {
      name += c;
    }
  }
  return out;
}

}  // namespace

TableResult validate_simumax(const CsvTable& csv, ValidationContext& context) {
  const char* setting = "profile megatron-te: Transformer Engine 2.11, distributed optimizer, nothing overlapped";
  ValidationTable time{"simumax_b200", "iteration time", "ms", setting, {}, {}, {}};
  ValidationTable memory{"simumax_b200_memory", "allocated memory, fullest stage", "GiB", setting, {}, {}, {}};
  ValidationTable ends{"simumax_b200_stages", "allocated memory, first stage", "GiB", setting, {}, {}, {}};
  ValidationTable reserved{
      "simumax_b200_reserved",
      "reserved memory, fullest stage",
      "GiB",
      "the step's tensors in order through the caching allocator (planner/allocator_replay.h); nothing fitted",
      {},
      {},
      {}};
  ValidationTable peer_time = time, peer_memory = memory;
  auto frame = context.framework("megatron-te");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    const Row r = csv.row(i);
    const std::string family = r.text("model");
    const std::string name = family == "llama3-70b"    ? "llama-3.1-70b"
                             : family == "llama3-405b" ? "llama-3.1-405b"
                             : family == "deepseekv2"  ? "deepseek-v2"
                             : family == "deepseekv3"  ? "deepseek-v3"
                                                       : "";
    if (name.empty()) {
      time.skipped.push_back({r.text("case"), "model not in the catalogue"});
      continue;
    }
    auto model = context.model(name);
    auto cost = context.cost("b200-sxm-180gb", r.integer("gpus"));
    if (!model) return fail(model.error());
    if (!cost) return fail(cost.error());
    model->layers = r.integer("layers");
    if (model->moe) model->moe->first_dense_layers = r.integer("dense_layers");
    TrainSetting setting_of{.sequence = r.integer("seq"),
                            .state = {2, r.text("grad_dtype") == "bf16" ? 2.0 : 4.0, 4, 8}};
    const TrainModel trained(*model, setting_of, *cost, *frame);
    TrainPoint p{.dp = r.integer("dp", 1),
                 .cp = r.integer("cp", 1),
                 .tp = r.integer("tp", 1),
                 .pp = r.integer("pp", 1),
                 .ep = r.integer("ep", 1)};
    p.sp = r.integer("sequence_parallel") == 1 && p.tp > 1;
    p.micro_batch = r.integer("micro_batch_size", 1);
    p.micro_batches = r.integer("num_micro_batches", 1);
    if (r.text("recompute") == "full") p.recompute = Recompute::full;
    if (r.text("recompute") == "selective") p.recompute = Recompute::selective;
    if (!trained.divides(p)) {
      time.skipped.push_back({r.text("case"), trained.why_invalid(p)});
      continue;
    }
    const TrainPrice price = trained.price(p);
    const std::string label = r.text("case");
    if (r.number("measured_ms") > 0) {
      time.rows.push_back({label, r.number("measured_ms"), 1e3 * price.step_seconds});
      peer_time.rows.push_back({label, r.number("measured_ms"), r.number("simumax_ms")});
    }
    if (r.number("measured_alloc_gib_max") > 0) {
      memory.rows.push_back({label, r.number("measured_alloc_gib_max"), price.peak_bytes / gib});
      peer_memory.rows.push_back({label, r.number("measured_alloc_gib_max"), r.number("simumax_alloc_gib")});
    }
    if (r.number("measured_reserved_gib_max") > 0)
      reserved.rows.push_back(
          {label, r.number("measured_reserved_gib_max"), static_cast<double>(replay_step(trained, p).reserved) / gib});
    if (p.pp > 1 && r.number("measured_alloc_gib_first_stage") > 0)
      ends.rows.push_back({label, r.number("measured_alloc_gib_first_stage"), price.first_stage_bytes / gib});
  }
  time.peers = {{"SimuMax", peer_time.mean_abs_error(), peer_time.max_abs_error()}};
  memory.peers = {{"SimuMax", peer_memory.mean_abs_error(), peer_memory.max_abs_error()}};
  return std::vector<ValidationTable>{time, memory, ends, reserved};
}

TableResult validate_torchtitan(const CsvTable& csv, ValidationContext& context) {
  const char* setting =
      "profiles torchtitan and torchtitan-compile: FSDP2, fp32 parameters and gradients reduced in "
      "fp32, selective checkpointing of every second matrix product";
  ValidationTable rate{"torchtitan", "tokens per second and GPU", "tokens/s", setting, {}, {}, {}};
  ValidationTable memory{"torchtitan_memory", "peak memory", "GiB", setting, {}, {}, {}};
  for (std::size_t i = 0; i < csv.size(); ++i) {
    const Row r = csv.row(i);
    const std::string label =
        fmt::format("{} {} on {} {}", r.text("model"), r.text("parallelism"), r.text("GPUs"), r.text("precision"));
    const bool compiled = r.text("precision").find("compile") != std::string::npos;
    if (r.text("precision").find("bf16") == std::string::npos) {
      rate.skipped.push_back({label, "float8 training is priced from datasheets only, uncalibrated"});
      continue;
    }
    auto frame = context.framework(compiled ? "torchtitan-compile" : "torchtitan");
    auto model = context.model(r.text("model").find("70B") != std::string::npos ? "llama-3.1-70b" : "llama-3.1-8b");
    const bool h200 = r.text("hardware").find("H200") != std::string::npos;
    const bool capped = r.text("hardware").find("500W") != std::string::npos;
    auto cost =
        context.cost(h200 ? "h200-sxm-141gb" : "h100-sxm-80gb", r.integer("GPUs"), 0.0, capped ? "h100-96gb-500w" : "");
    if (!frame) return fail(frame.error());
    if (!model) return fail(model.error());
    if (!cost) return fail(cost.error());
    const TrainModel trained(*model, {.sequence = r.integer("seq"), .state = {2, 4, 4, 8}}, *cost, *frame);
    auto by = degrees(r.text("parallelism"));
    TrainPoint p{.cp = std::max<std::int64_t>(1, by["CP"]),
                 .tp = std::max<std::int64_t>(1, by["TP"]),
                 .pp = std::max<std::int64_t>(1, by["PP"])};
    p.dp = r.integer("GPUs") / (p.cp * p.tp * p.pp);
    p.sp = p.tp > 1;
    p.sharding = Sharding::fsdp;
    p.recompute = r.text("AC") == "full"        ? Recompute::full
                  : r.text("AC") == "selective" ? Recompute::selective
                                                : Recompute::none;
    p.micro_batch = r.integer("local_batch", 1);
    if (!trained.divides(p)) {
      rate.skipped.push_back({label, trained.why_invalid(p)});
      continue;
    }
    const TrainPrice price = trained.price(p);
    rate.rows.push_back(
        {label, r.number("TPS_per_GPU"), price.tokens / price.step_seconds / static_cast<double>(p.ranks())});
    if (r.number("mem_GiB") > 0) memory.rows.push_back({label, r.number("mem_GiB"), price.peak_bytes / gib});
  }
  return std::vector<ValidationTable>{rate, memory};
}

TableResult validate_megatron_bridge(const CsvTable& csv, ValidationContext& context) {
  ValidationTable out{
      "megatron_bridge",
      "tokens per second and GPU",
      "tokens/s",
      "profile megatron-te-overlap; FP8, MXFP8 and NVFP4 from datasheets, uncalibrated: GEMMs at the "
      "bf16 efficiency of the low-precision peak; recomputation not stated: none, or the least that fits",
      {},
      {},
      {}};
  const std::map<std::string, std::string> models = {{"LLAMA3_70B", "llama-3.1-70b"},
                                                     {"LLAMA3.1_405B", "llama-3.1-405b"},
                                                     {"DeepSeekV3", "deepseek-v3"},
                                                     {"Qwen3_30B_a3B", "qwen3-30b-a3b"},
                                                     {"Qwen3_235B_a22B", "qwen3-235b-a22b"}};
  const std::map<std::string, std::string> gpus = {{"DGX-GB200", "gb200-nvl72"},
                                                   {"DGX-GB300", "gb300-nvl72"},
                                                   {"DGX-B200", "b200-sxm-180gb"},
                                                   {"DGX-B300", "b300-sxm-288gb"},
                                                   {"DGX-H100", "h100-sxm-80gb"}};
  const std::map<std::string, std::string> precisions = {
      {"BF16", "bf16"}, {"FP8", "fp8"}, {"MXFP8", "mxfp8"}, {"NVFP4", "nvfp4"}};
  auto frame = context.framework("megatron-te-overlap");
  if (!frame) return fail(frame.error());
  for (std::size_t i = 0; i < csv.size(); ++i) {
    const Row r = csv.row(i);
    const std::string label = fmt::format("{} {} {} {} {}", r.text("release"), r.text("task"), r.text("model"),
                                          r.text("system"), r.text("precision"));
    const auto name = models.find(r.text("model"));
    const auto gpu = gpus.find(r.text("system"));
    const auto precision = precisions.find(r.text("precision"));
    if (name == models.end() || gpu == gpus.end() || precision == precisions.end() ||
        r.text("task") != "pre-training") {
      out.skipped.push_back({label, name == models.end()               ? "architecture not in the catalogue"
                                    : r.text("task") != "pre-training" ? "task " + r.text("task")
                                                                       : "system or precision unknown"});
      continue;
    }
    auto model = context.model(name->second);
    // Layouts in powers of two use 64 of the 72 GPUs of an NVL72 domain.
    const bool rack = gpu->second.find("nvl72") != std::string::npos;
    auto cost = context.cost(gpu->second, r.integer("gpus"), 0.0, "", rack ? 64 : 8);
    if (!model) return fail(model.error());
    if (!cost) return fail(cost.error());
    if (cost->peak_flops(precision->second) <= 0.0) {
      out.skipped.push_back({label, fmt::format("{} has no {} products", gpu->second, precision->second)});
      continue;
    }
    const TrainModel trained(
        *model, {.sequence = r.integer("seq"), .precision = precision->second, .state = {2, 4, 4, 8}}, *cost, *frame);
    TrainPoint p{.cp = r.integer("cp", 1),
                 .tp = r.integer("tp", 1),
                 .pp = r.integer("pp", 1),
                 .vpp = r.integer("vpp", 1),
                 .ep = r.integer("ep", 1)};
    p.dp = r.integer("gpus") / std::max<std::int64_t>(1, p.cp * p.tp * p.pp);
    p.sp = p.tp > 1;
    p.micro_batch = r.integer("mbs", 1);
    p.micro_batches = std::max<std::int64_t>(1, r.integer("gbs") / std::max<std::int64_t>(1, p.dp * p.micro_batch));
    if (!trained.divides(p)) p.vpp = 1;  // interleaving of layers that do not divide: uneven chunks, priced without
    if (!trained.divides(p)) {
      out.skipped.push_back({label, trained.why_invalid(p)});
      continue;
    }
    const double capacity = static_cast<double>(r.text("system") == "DGX-H100" ? 80e9 : 180e9);
    TrainPrice price = trained.price(p);
    for (Recompute mode : {Recompute::selective, Recompute::full})
      if (price.total_bytes() > capacity) p.recompute = mode, price = trained.price(p);
    out.rows.push_back(
        {label, r.number("tokens_per_s_per_gpu"), price.tokens / price.step_seconds / static_cast<double>(p.ranks())});
  }
  return std::vector<ValidationTable>{out};
}

}  // namespace hotbunk
