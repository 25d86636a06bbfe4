#include "cli/capabilities.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/parallel.h"
#include "cli/command.h"
#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/names.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

using Sets = std::vector<std::string>;

/// A key's value, and what must be set for it; the first that plans of several ways to have it.
struct Question {
  std::string key, value;
  std::vector<Sets> ways;
};

/// Executes as it stands, and has layers, heads and ranks enough for what is asked of it.
constexpr std::string_view base = R"(name: capabilities
model: qwen2.5-7b
cluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}
train: {engine: fsdp2, layout: {dp: 16}, micro_batch_tokens: 8192, recompute: full}
rollout: {engine: hotbunk, layout: {tp: 4, dp: 4}, memory_fraction: 0.7}
algorithm: {prompts: 32, samples_per_prompt: 4}
workload: {prompt_tokens: {mean: 256, max: 512}, response_tokens: {mean: 512, max: 1024}}
)";

template <class E>
void ask_each(std::vector<Question>& out, const std::string& key, const Sets& with = {}) {
  for (const std::string_view value : EnumNames<E>::names) {
    Sets sets = with;
    sets.push_back(fmt::format("{}={}", key, value));
    out.push_back({key, std::string(value), {std::move(sets)}});
  }
}

std::vector<Question> questions() {
  std::vector<Question> out;
  const auto ask = [&](std::string key, std::string value, Sets sets) {
    out.push_back({std::move(key), std::move(value), {std::move(sets)}});
  };
  for (const std::string& model : catalog_names("models")) {
    Question q{"model", model, {}};
    for (const char* tp : {"4", "2", "8", "1", "16"})
      q.ways.push_back({"model=" + model, "cluster.gpu=b200-sxm-180gb", "cluster.nodes=16", "train.layout.dp=128",
                        "algorithm.prompts=128", fmt::format("rollout.layout.tp={}", tp),
                        fmt::format("rollout.layout.dp={}", 128 / std::stoi(tp))});
    Sets few_positions = q.ways[3];  // on one rank
    few_positions.push_back("workload.response_tokens={mean: 256, max: 256}");
    q.ways.push_back(std::move(few_positions));
    out.push_back(std::move(q));
  }
  ask_each<TrainEngine>(out, "train.engine");
  const Sets flat_tp = {"train.engine=fsdp1", "train.layout.tp=2", "train.layout.dp=8", "train.layout.sp=true"};
  ask("train.engine", "fsdp1 with tp 2", flat_tp);
  ask("train.engine", "fsdp1 with pp 2", {"train.engine=fsdp1", "train.layout.pp=2", "train.layout.dp=8"});
  ask("train.engine", "fsdp1 with ep 2", {"train.engine=fsdp1", "model=qwen3-30b-a3b", "train.layout.ep=2"});
  ask("train.layout.fsdp", "8", {"train.layout.fsdp=8"});
  ask("train.layout.shard_over", "[dp]", {"train.layout.cp=2", "train.layout.dp=8", "train.layout.shard_over=[dp]"});
  ask("train.reshard_after_forward", "8", {"train.reshard_after_forward=8"});
  ask("train.reshard_after_forward", "4 with pp 2",
      {"train.reshard_after_forward=4", "train.layout.pp=2", "train.layout.dp=8"});
  ask("train.layout.tp", "2", {"train.layout.tp=2", "train.layout.dp=8"});
  ask("train.layout.sp", "true", {"train.layout.tp=2", "train.layout.dp=8", "train.layout.sp=true"});
  ask("train.layout.pp", "2", {"train.layout.pp=2", "train.layout.dp=8"});
  ask("train.layout.vpp", "2", {"train.layout.pp=2", "train.layout.dp=8", "train.layout.vpp=2"});
  ask("train.layout.cp", "2", {"train.layout.cp=2", "train.layout.dp=8"});
  ask("train.layout.ulysses", "2", {"train.layout.ulysses=2", "train.layout.dp=8"});
  ask("train.layout.ep", "2", {"model=qwen3-30b-a3b", "train.layout.ep=2"});
  ask_each<Recompute>(out, "train.recompute");
  ask_each<Offload>(out, "train.offload");
  for (const char* dtype : {"bf16", "fp32", "fp16"})
    ask("train.precision.params", dtype, {fmt::format("train.precision.params={}", dtype)});
  for (const char* gemm : {"fp8", "mxfp8", "nvfp4"})
    ask("train.precision.gemm", gemm, {"cluster.gpu=b200-sxm-180gb", fmt::format("train.precision.gemm={}", gemm)});
  ask_each<OptimizerName>(out, "optimizer.name");
  ask("optimizer.cpu_fraction", "0.5", {"train.engine=zero1", "optimizer.cpu_fraction=0.5"});
  ask_each<RolloutEngine>(out, "rollout.engine");
  ask("rollout.layout.pp", "2", {"rollout.layout.pp=2", "rollout.layout.dp=2"});
  ask("rollout.layout.cp", "2", {"rollout.layout.cp=2", "rollout.layout.dp=2"});
  ask("rollout.layout.attention_dp", "4", {"rollout.layout.attention_dp=4"});
  ask("rollout.layout.attention_dp", "2", {"rollout.layout.attention_dp=2"});
  for (const char* ep : {"2", "4"})
    ask("rollout.layout.ep", ep, {"model=qwen3-30b-a3b", fmt::format("rollout.layout.ep={}", ep)});
  ask("rollout.dtype", "fp8", {"rollout.dtype=fp8", "rollout.engine=sglang"});
  ask("rollout.kv_cache_dtype", "bf16", {"rollout.kv_cache_dtype=bf16"});
  ask("rollout.kv_cache_dtype", "fp8", {"rollout.kv_cache_dtype=fp8", "rollout.engine=sglang"});
  ask_each<SyncMode>(out, "sync.mode");
  const Sets apart = {"cluster.nodes=4", "train.offload=none", "rollout.sleep=false"};
  ask("placement", "colocated", {});
  for (const char* steps : {"0", "1"}) {
    Sets sets = apart;
    sets.insert(sets.end(), {"placement=disaggregated", fmt::format("algorithm.max_staleness={}", steps)});
    ask(steps[0] == '0' ? "placement" : "algorithm.max_staleness", steps[0] == '0' ? "disaggregated" : steps, sets);
  }
  ask("transition", "auto", {"transition=auto"});
  ask_each<AlgorithmName>(out, "algorithm.name");
  for (const std::string& profile : catalog_names("frameworks")) {
    const Sets name = {"profile=" + profile}, pipeline = {name[0], "train.engine=megatron", "rollout.engine=sglang"};
    out.push_back({"profile", profile, {name, pipeline}});
  }
  return out;
}

std::string first_line(const Diagnostics& problems) { return problems.empty() ? "" : problems.front().message; }

CapabilityRow answer(const Question& q, const Sets& sets) {
  CapabilityRow row{.key = q.key, .value = q.value};
  const auto scenario = load_scenario_text(std::string(base), "capabilities.yaml", sets);
  if (!scenario) return row.why = first_line(scenario.error()), row;
  const auto pricer = ScenarioPricer::make(*scenario, catalog_root());
  if (!pricer) return row.why = first_line(pricer.error()), row;
  if (const auto why = (*pricer)->why_unpriced((*pricer)->point())) return row.why = why->message, row;
  row.plans = true;
  const auto job = lowered_or_priced(*scenario);
  if (!job) return row.why = first_line(job.error()), row;
  row.simulates = true;
  const auto reasons = unsupported_to_execute(*scenario);
  row.executes = reasons.empty();
  if (row.executes) return row;
  // Not a reason that only what stands beside it gives.
  Sets beside = sets;
  std::erase_if(beside, [&](const std::string& set) { return set.starts_with(q.key + "="); });
  const auto without = load_scenario_text(std::string(base), "capabilities.yaml", beside);
  const auto others = without ? unsupported_to_execute(*without) : std::vector<std::string>();
  const auto own = std::ranges::find_if(reasons, [&](const std::string& r) { return !std::ranges::count(others, r); });
  row.why = own == reasons.end() ? reasons.front() : *own;
  return row;
}

}  // namespace

std::vector<CapabilityRow> capabilities() {
  const std::vector<Question> all = questions();
  std::vector<CapabilityRow> out(all.size());
  in_parallel(all.size(), [&](std::size_t i) {
    for (const Sets& sets : all[i].ways)
      if (out[i] = answer(all[i], sets); out[i].plans) return;
  });
  return out;
}

}  // namespace hotbunk
