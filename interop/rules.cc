#include "interop/rules.h"

#include <fmt/format.h>

#include <algorithm>

#include "interop/launch_model.h"
#include "interop/rule_parts.h"
#include "interop/settings.h"
#include "spec/catalog.h"
#include "spec/scenario_keys.h"

namespace hotbunk {

const RoleValue* RuleInput::find(const std::string& role) const {
  const auto at = roles.find(role);
  return at == roles.end() ? nullptr : &at->second;
}

std::optional<double> RuleInput::number(const std::string& role) {
  const RoleValue* const found = find(role);
  if (found == nullptr) return std::nullopt;
  if (const auto value = number_of(found->value)) return value;
  problems.push_back({.code = "E152",
                      .message = fmt::format("{} is no number", found->said),
                      .where = found->where,
                      .notes = {},
                      .help = {}});
  roles.erase(role);
  return std::nullopt;
}

SourceLocation RuleInput::where(const std::string& role) const {
  const RoleValue* const found = find(role);
  return found == nullptr ? SourceLocation{} : found->where;
}

bool RuleInput::trains_only() const { return scenario_text("algorithm.name") == "sft"; }

bool RuleInput::is_true(const std::string& role) const {
  const RoleValue* const found = find(role);
  return found != nullptr && found->value == "true";
}

std::string RuleInput::said(const std::string& role) const {
  const RoleValue* const found = find(role);
  return found == nullptr ? "" : found->said;
}

void RuleInput::set(const std::string& key, std::string value, std::string comment, SourceLocation where) {
  if (chosen.contains(key)) return;
  std::erase_if(lines, [&](const ScenarioLine& line) { return line.key == key; });
  lines.push_back({key, std::move(value), std::move(comment), std::move(where)});
}

void RuleInput::set(const std::string& key, double value, std::string comment, SourceLocation where) {
  set(key, fmt::format("{}", value), std::move(comment), std::move(where));
}

std::string RuleInput::scenario_text(const std::string& key) const {
  if (const auto at = chosen.find(key); at != chosen.end()) return at->second;
  for (const ScenarioLine& line : lines)
    if (line.key == key) return line.value;
  const ScenarioKey* const known = find_scenario_key(key);
  return known == nullptr ? "" : yaml_of(known->get(Scenario{}));
}

double RuleInput::scenario_number(const std::string& key) const { return number_of(scenario_text(key)).value_or(0); }

void RuleInput::contradict(const std::string& role, std::string message, std::vector<std::string> notes,
                           std::string help) {
  const RoleValue* const found = find(role);
  problems.push_back({.code = "E151",
                      .message = std::move(message),
                      .where = found == nullptr ? SourceLocation{} : found->where,
                      .notes = std::move(notes),
                      .help = std::move(help)});
}

void RuleOutput::give(const std::string& role, double value) { give(role, fmt::format("{}", value)); }

namespace rules {

/// What is trained, where a system's launches train several things: RL unless said.
void read_task(RuleInput& in) {
  const RoleValue* const task = in.find("task");
  if (task == nullptr || task->value == "rl") return;
  if (task->value == "sft" || task->value == "ppo")
    return in.set("algorithm.name", task->value, task->said, task->where);
  in.problems.push_back({.code = "E152",
                         .message = fmt::format("a launch of {} is not planned", task->value),
                         .where = task->where,
                         .notes = {task->said, "planned are GRPO, PPO and SFT"},
                         .help = {}});
}

void write_task(RuleOutput&) {}  // RL is what they do where nothing is said

void read_model_role(RuleInput& in) {
  find_launch_model(in);
  const auto rows = in.number("vocab_multiple");
  if (rows && *rows < 1)
    return in.contradict("vocab_multiple", "a vocabulary is padded to a multiple of at least 1 row",
                         {in.said("vocab_multiple")}, "leave it out, or give the rows");
  if (rows) in.set("train.make_vocab_size_divisible_by", *rows, in.said("vocab_multiple"), in.where("vocab_multiple"));
}

void write_model_role(RuleOutput& out) {
  const ModelSpec& m = out.scenario.model;
  const std::string loaded = m.hub_name.empty() ? hub_name_of(m.name) : m.hub_name;  // other systems know no catalogue
  const auto names = catalog_names("models");
  const bool known = !loaded.empty() || std::ranges::find(names, m.name) != names.end();
  const std::string own = m.weights_path.empty() ? m.name : m.weights_path;
  const bool spelled = !known && out.spells_sizes && give_model_sizes(out);
  if (!spelled) out.give("model", !loaded.empty() ? loaded : known ? m.name : own);
  // Beside sizes: an engine and a tokenizer read the folder.
  else if (out.scenario.algorithm.name != AlgorithmName::sft && !m.weights_path.empty())
    out.give("model", m.weights_path);
  if (m.vocab_multiple > 0) out.give("vocab_multiple", static_cast<double>(m.vocab_multiple));
}

}  // namespace rules

namespace {

const std::vector<LaunchRule>& all_rules() {
  static const std::vector<LaunchRule> all = {
      {"task", {"task"}, {}, rules::read_task, rules::write_task},
      {"model",
       {"model",        "max_positions", "model_flavor",  "layers", "hidden",   "heads",
        "kv_heads",     "head_dim",      "ffn",           "vocab",  "experts",  "experts_per_token",
        "expert_ffn",   "positions",     "swiglu",        "untied", "qkv_bias", "rotary_base",
        "norm_epsilon", "unspelled",     "vocab_multiple"},
       {{"train.make_vocab_size_divisible_by", {"vocab_multiple"}}},
       rules::read_model_role,
       rules::write_model_role},
      {"layout",
       {"sequence_parallel", "expert_tp", "shard_ranks", "replicas", "distributed_optimizer", "optimizer_instances",
        "engine_gpus", "engine_dp_attention", "engine_attention_dp", "engine_data_parallel", "engine_tp",
        "layers_per_virtual_stage", "first_stage_layers", "last_stage_layers"},
       {{"train.layout.sp", {"sequence_parallel"}},
        {"train.layout.etp", {"expert_tp"}},
        {"train.layout.vpp", {"layers_per_virtual_stage"}},
        {"train.layout.fsdp", {"shard_ranks", "distributed_optimizer"}},
        {"rollout.layout.tp", {"engine_gpus", "engine_tp"}},
        {"rollout.layout.attention_dp", {"engine_attention_dp", "engine_data_parallel"}},
        {"train.pipeline_split", {"first_stage_layers", "last_stage_layers"}},
        {"train.num_layers_in_first_pipeline_stage", {"first_stage_layers"}},
        {"train.num_layers_in_last_pipeline_stage", {"last_stage_layers"}},
        {"train.pipeline_schedule", {"layers_per_virtual_stage"}}},
       rules::read_layout,
       rules::write_layout},
      {"cluster",
       {"train_nodes", "cluster_nodes", "train_gpus_per_node", "colocated", "rollout_nodes", "rollout_gpus_per_node",
        "rollout_gpus", "rollout_engines"},
       {{"cluster.nodes", {"train_nodes", "cluster_nodes"}},
        {"cluster.gpus_per_node", {"train_gpus_per_node"}},
        {"placement", {"colocated"}},
        {"train.layout.dp", {"train_nodes", "cluster_nodes"}},
        {"rollout.layout.dp", {"colocated"}}},
       rules::read_cluster,
       rules::write_cluster},
      {"lengths",
       {"sequence", "max_prompt", "max_response", "max_total", "prefill_tokens"},
       {{"workload.prompt_tokens.max", {"max_prompt", "sequence"}},
        {"workload.response_tokens.max", {"max_response", "sequence"}},
        {"workload.max_tokens", {"max_total"}},
        {"rollout.max_prefill_tokens", {"prefill_tokens"}}},
       rules::read_lengths,
       rules::write_lengths},
      {"batches",
       {"prompts", "mini_batch_prompts", "mini_batch_samples", "mini_batches", "stream_mini_batches", "global_batch"},
       {{"algorithm.prompts", {"prompts", "global_batch"}},
        {"algorithm.mini_batches", {"mini_batch_prompts", "mini_batch_samples", "mini_batches"}}},
       rules::read_batches,
       rules::write_batches},
      {"micro-batches",
       {"dynamic", "micro_tokens", "micro_tokens_or_sample", "micro_sequences", "packed", "packed_tokens",
        "packed_dynamically", "dynamic_tokens"},
       {{"train.micro_batch_tokens", {"micro_tokens", "micro_tokens_or_sample", "packed_tokens", "dynamic_tokens"}},
        {"train.micro_batch_sequences", {"micro_sequences"}}},
       rules::read_micro_batches,
       rules::write_micro_batches},
      {"log-prob micro-batches",
       {"logprob_dynamic", "logprob_tokens", "logprob_tokens_or_sample", "logprob_sequences", "logprob_packed_tokens",
        "logprob_dynamic_tokens", "reference_dynamic", "reference_tokens", "reference_sequences"},
       {{"train.logprob_micro_batch_tokens", {"logprob_tokens", "logprob_tokens_or_sample", "logprob_packed_tokens"}},
        {"train.logprob_micro_batch_sequences", {"logprob_sequences"}}},
       rules::read_logprob_batches,
       rules::write_logprob_batches},
      {"recompute",
       {"checkpointing", "recompute_granularity", "recompute_activations", "recompute_modules"},
       {{"train.recompute", {"checkpointing", "recompute_granularity"}},
        {"train.recompute_modules", {"recompute_modules"}}},
       rules::read_recompute,
       rules::write_recompute},
      {"offload",
       {"offload_params", "offload_grads", "offload_optimizer", "offload_layers"},
       {{"train.offload", {"offload_params", "offload_optimizer", "offload_layers"}},
        {"transition", {"offload_params"}}},
       rules::read_offload,
       rules::write_offload},
      {"CPU optimizer",
       {"optimizer_on_cpu", "optimizer_cpu_fraction"},
       {{"optimizer.cpu_fraction", {"optimizer_on_cpu"}}},
       rules::read_cpu_optimizer,
       rules::write_cpu_optimizer},
      {"adapters",
       {"adapters_on", "adapter_rank", "adapter_alpha", "adapter_matrices", "adapter_matrix_names", "adapters_of_all",
        "adapter_modules", "adapter_kind", "adapter_fused_modules", "adapter_folder", "adapters_merged",
        "adapter_base_format"},
       {{"train.lora.rank", {"adapter_rank"}},
        {"train.lora.alpha", {"adapter_alpha"}},
        {"train.lora.targets",
         {"adapter_matrices", "adapter_matrix_names", "adapter_modules", "adapter_fused_modules"}},
        {"train.lora.adapter", {"adapter_folder"}}},
       rules::read_adapters,
       rules::write_adapters},
      {"loss",
       {"clip", "clip_low", "clip_high", "kl_in_loss", "kl_loss_coef", "kl_in_reward", "kl_reward_coef"},
       {{"algorithm.clip_low", {"clip_low", "clip"}},
        {"algorithm.clip_high", {"clip_high", "clip"}},
        {"algorithm.reference", {"kl_in_loss", "kl_loss_coef"}},
        {"algorithm.kl_coef", {"kl_loss_coef"}}},
       rules::read_loss,
       rules::write_loss},
      {"critic",
       {"critic_nodes", "critic_gpus_per_node"},
       {{"algorithm.critic_placement", {"critic_nodes"}}},
       rules::read_critic,
       rules::write_critic},
      {"reference",
       {"reference_nodes", "reference_gpus_per_node", "reference_beside_actor"},
       {{"algorithm.reference_placement", {"reference_nodes"}}},
       rules::read_reference,
       rules::write_reference},
      {"padding",
       {"padding_removed"},
       {{"train.padding", {"padding_removed", "packed"}}},
       rules::read_padding,
       rules::write_padding},
      {"staleness",
       {"asynchronous", "staleness"},
       {{"algorithm.max_staleness", {"asynchronous", "staleness"}}},
       rules::read_staleness,
       rules::write_staleness},
  };
  return all;
}

}  // namespace

std::span<const LaunchRule> launch_rules() { return all_rules(); }

bool is_launch_role(const std::string& role) {
  return std::ranges::any_of(
      launch_rules(), [&](const LaunchRule& rule) { return std::ranges::find(rule.roles, role) != rule.roles.end(); });
}

}  // namespace hotbunk
