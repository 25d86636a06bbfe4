#include "interop/rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "interop/launch_model.h"
#include "spec/names.h"
#include "spec/scenario_keys.h"
#include "spec/transition.h"

namespace hotbunk {

// ---- the two ends
// ----------------------------------------------------------------------------------------------------

const RoleValue* RuleInput::find(const std::string& role) const {
  const auto at = roles.find(role);
  return at == roles.end() ? nullptr : &at->second;
}

std::optional<double> RuleInput::number(const std::string& role) {
  const RoleValue* const found = find(role);
  if (found == nullptr) return std::nullopt;
  double value = 0;
  const std::string& text = found->value;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && stop == text.data() + text.size() && std::isfinite(value)) return value;
  problems.push_back({.code = "E152",
                      .message = fmt::format("{} is no number", found->said),
                      .where = found->where,
                      .notes = {},
                      .help = {}});
  roles.erase(role);
  return std::nullopt;
}

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

double RuleInput::scenario_number(const std::string& key) const {
  const std::string text = scenario_text(key);
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

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

namespace {

SourceLocation where_of(const RuleInput& in, const std::string& role) {
  const RoleValue* const found = in.find(role);
  return found == nullptr ? SourceLocation{} : found->where;
}

bool trains_only(const RuleInput& in) { return in.scenario_text("algorithm.name") == "sft"; }

// ---- model
// -----------------------------------------------------------------------------------------------------------

void read_model_role(RuleInput& in) { find_launch_model(in); }

void write_model_role(RuleOutput& out) {
  const ModelSpec& m = out.scenario.model;
  out.give("model", m.hub_name.empty() ? m.name : m.hub_name);
}

// ---- machines and placement
// ------------------------------------------------------------------------------------------

double train_factor(const RuleInput& in) {
  double product = 1;
  for (const char* key : {"cp", "ulysses", "tp", "pp"})
    product *= in.scenario_number(std::string("train.layout.") + key);
  return std::max(product, 1.0);
}
double engine_ranks(const RuleInput& in) {
  double product = 1;
  for (const char* key : {"cp", "tp", "pp"}) product *= in.scenario_number(std::string("rollout.layout.") + key);
  return std::max(product, 1.0);
}

void read_cluster(RuleInput& in) {
  if (!in.chosen.contains("cluster.gpu"))
    in.set("cluster.gpu", "h100-sxm-80gb", "assumed, a launch names no GPU: --set cluster.gpu=NAME");
  const double per_node = in.number("train_gpus_per_node").value_or(8);
  const bool total = in.find("cluster_nodes") != nullptr;
  const std::string nodes_role = total ? "cluster_nodes" : "train_nodes";
  const double nodes = in.number(nodes_role).value_or(1);
  const bool disaggregated = in.find("colocated") != nullptr && !in.is_true("colocated") && !trains_only(in);
  in.set("cluster.gpus_per_node", per_node, in.said("train_gpus_per_node"), where_of(in, "train_gpus_per_node"));
  if (!disaggregated) {
    in.set("cluster.nodes", nodes, in.said(nodes_role), where_of(in, nodes_role));
    in.set("train.layout.dp", "auto", "what the other dimensions leave of the ranks");
    if (trains_only(in)) return;
    in.set("rollout.layout.dp", "auto", "as many engines as the ranks hold");
    if (const auto engines = in.number("rollout_engines"))
      if (*engines * engine_ranks(in) != nodes * per_node)
        in.contradict(
            "rollout_engines", "engines that share the GPUs with training do not cover them",
            {fmt::format("{}: {} engines x {} GPUs = {}; training has {} x {} = {}", in.said("rollout_engines"),
                         *engines, engine_ranks(in), *engines * engine_ranks(in), nodes, per_node, nodes * per_node)},
            "change the number of engines or their tensor parallel");
    return;
  }
  double rollout = 0;
  std::string why = in.said("colocated");
  if (const auto n = in.number("rollout_nodes"); n && *n > 0) {
    const double each = in.number("rollout_gpus_per_node").value_or(per_node);
    rollout = *n * each;
    why += ", " + in.said("rollout_nodes");
  } else if (const auto gpus = in.number("rollout_gpus")) {
    rollout = *gpus;
    why += ", " + in.said("rollout_gpus");
  } else if (const auto engines = in.number("rollout_engines")) {
    rollout = *engines * engine_ranks(in);
    why += ", " + in.said("rollout_engines");
  } else if (const auto alone = in.number("rollout_gpus_per_node")) {
    rollout = *alone;
    why += ", " + in.said("rollout_gpus_per_node");
  }
  const double training = total ? nodes * per_node - rollout : nodes * per_node, all = training + rollout;
  if (rollout <= 0 || training <= 0)
    return in.contradict("colocated", "training and rollout are apart, and one of them has no GPUs",
                         {fmt::format("training {} GPUs, rollout {}", training, rollout)},
                         "say how many GPUs the rollout has");
  const double whole = std::ceil(all / per_node);
  if (whole * per_node != all)
    return in.contradict("colocated", "training and rollout together are no whole nodes",
                         {fmt::format("{} + {} GPUs = {}, {} a node", training, rollout, all, per_node)},
                         "one cluster of equal nodes is what a scenario has");
  in.set("cluster.nodes", whole, fmt::format("training {} + rollout {} GPUs: {}", training, rollout, why),
         where_of(in, nodes_role));
  in.set("placement", "disaggregated", why, where_of(in, "colocated"));
  if (std::fmod(training, train_factor(in)) != 0)
    return in.contradict(nodes_role, "training's GPUs do not divide by its layout",
                         {fmt::format("{} GPUs, tp x cp x pp x ulysses = {}", training, train_factor(in))},
                         "change the layout or the GPUs");
  in.set("train.layout.dp", training / train_factor(in), fmt::format("{} GPUs of training", training));
  in.set("rollout.layout.dp", "auto", "as many engines as the rest holds");
}

void write_cluster(RuleOutput& out) {
  const Scenario& s = out.scenario;
  const bool apart = s.placement == PlacementMode::disaggregated;
  const auto per_node = static_cast<double>(s.cluster.gpus_per_node);
  const auto train = static_cast<double>(s.train.layout.ranks()),
             rollout = static_cast<double>(s.rollout.layout.ranks());
  out.give("cluster_nodes", static_cast<double>(s.cluster.nodes));
  out.give("train_gpus_per_node", per_node);
  out.give("colocated", !apart);
  out.give("train_nodes", apart ? train / per_node : static_cast<double>(s.cluster.nodes));
  if (apart) {
    out.give("rollout_nodes", rollout / per_node);
    out.give("rollout_gpus_per_node", per_node);
    out.give("rollout_gpus", rollout);
  }
  out.give("rollout_engines", static_cast<double>(s.rollout.layout.dp));
}

// ---- layouts
// ---------------------------------------------------------------------------------------------------------

void read_layout(RuleInput& in) {
  const double tp = in.scenario_number("train.layout.tp"), pp = in.scenario_number("train.layout.pp");
  if (in.find("sequence_parallel") != nullptr)
    in.set("train.layout.sp", in.is_true("sequence_parallel") && tp > 1 ? "true" : "false",
           in.said("sequence_parallel") + (in.is_true("sequence_parallel") && tp == 1 ? ", of one rank" : ""),
           where_of(in, "sequence_parallel"));
  const bool moe = in.model && in.model->moe;
  if (const auto etp = in.number("expert_tp"); etp && moe)
    in.set("train.layout.etp", *etp, in.said("expert_tp"), where_of(in, "expert_tp"));
  else if (moe && in.scenario_text("train.engine") == "megatron" && tp > 1)
    in.set("train.layout.etp", tp, "Megatron's default: experts are cut as tp cuts the rest");
  if (const auto shard = in.number("shard_ranks"); shard && in.number("replicas").value_or(1) > 1)
    in.set("train.layout.fsdp", *shard < 0 ? -1 : *shard * in.scenario_number("train.layout.cp"),
           in.said("shard_ranks"), where_of(in, "shard_ranks"));
  if (const auto gpus = in.number("engine_gpus")) {
    const double stages = in.scenario_number("rollout.layout.pp");
    in.set("rollout.layout.tp", *gpus / stages, in.said("engine_gpus"), where_of(in, "engine_gpus"));
  }
  if (const auto each = in.number("engine_attention_dp"); each && in.is_true("engine_dp_attention"))
    in.set("rollout.layout.attention_dp", *each, in.said("engine_attention_dp"), where_of(in, "engine_attention_dp"));
  if (!in.model || pp <= 1) return;
  const double layers = static_cast<double>(in.model->layers);
  double vpp = in.scenario_number("train.layout.vpp");
  if (const auto each = in.number("layers_per_virtual_stage"); each && *each > 0) {
    vpp = layers / pp / *each;
    in.set("train.layout.vpp", vpp, in.said("layers_per_virtual_stage"), where_of(in, "layers_per_virtual_stage"));
  }
  if (vpp > 1) in.set("train.pipeline_schedule", "interleaved", "virtual stages");
  const auto first = in.number("first_stage_layers"), last = in.number("last_stage_layers");
  if (!first && !last) return;
  const double ends = (first ? 1 : 0) + (last ? 1 : 0), rest = layers - first.value_or(0) - last.value_or(0);
  const double chunks = pp - ends;
  const std::string said = in.said("first_stage_layers") + (first && last ? ", " : "") + in.said("last_stage_layers");
  if (vpp > 1 || rest < 0 || (chunks > 0 && std::fmod(rest, chunks) != 0) || (chunks == 0 && rest != 0))
    return in.contradict(first ? "first_stage_layers" : "last_stage_layers",
                         "the stages between do not divide the layers",
                         {fmt::format("{} layers - {} = {} for {} stages", layers, layers - rest, rest, chunks), said},
                         "change the layers of the first or last stage");
  std::vector<double> split(static_cast<std::size_t>(pp), chunks > 0 ? rest / chunks : 0);
  if (first) split.front() = *first;
  if (last) split.back() = *last;
  in.set("train.pipeline_split", fmt::format("[{}]", fmt::join(split, ", ")), said,
         where_of(in, first ? "first_stage_layers" : "last_stage_layers"));
}

void write_layout(RuleOutput& out) {
  const TrainLayout& t = out.scenario.train.layout;
  const RolloutLayout& r = out.scenario.rollout.layout;
  out.give("sequence_parallel", t.sp);
  if (out.scenario.model.moe) out.give("expert_tp", static_cast<double>(t.etp));
  out.give("engine_gpus", static_cast<double>(r.tp * r.pp));
  if (r.attention_dp > 1) {
    out.give("engine_dp_attention", true);
    out.give("engine_attention_dp", static_cast<double>(r.attention_dp));
  }
  if (t.vpp > 1) out.give("layers_per_virtual_stage", static_cast<double>(out.scenario.model.layers / t.pp / t.vpp));
  const auto& split = out.scenario.train.pipeline_split;
  if (split.size() < 2) return;
  const bool even_between =
      split.size() < 4 || std::all_of(split.begin() + 1, split.end() - 1, [&](auto n) { return n == split[1]; });
  if (!even_between || t.vpp > 1) return;  // the first and the last stage alone have keys
  out.give("first_stage_layers", static_cast<double>(split.front()));
  out.give("last_stage_layers", static_cast<double>(split.back()));
}

// ---- lengths
// ---------------------------------------------------------------------------------------------------------

/// A launch says how long prompts and responses may be, never how long they are.
constexpr double assumed_prompt_part = 0.25, assumed_response_part = 1.0 / 3.0;

void read_lengths(RuleInput& in) {
  if (const auto whole = in.number("sequence")) {  // pre-training: every sample is as long
    const std::string said = in.said("sequence");
    const SourceLocation where = where_of(in, "sequence");
    in.set("workload.prompt_tokens.mean", 1, said, where);
    in.set("workload.prompt_tokens.max", 1, said, where);
    in.set("workload.prompt_tokens.distribution", "fixed", said, where);
    in.set("workload.response_tokens.mean", *whole - 1, said, where);
    in.set("workload.response_tokens.max", *whole - 1, said, where);
    in.set("workload.response_tokens.distribution", "fixed", said, where);
    return;
  }
  const auto total = in.number("max_total"), prompt = in.number("max_prompt"), response = in.number("max_response");
  double longest_prompt = prompt.value_or(0), longest_response = response.value_or(0);
  std::string prompt_said = in.said("max_prompt"), response_said = in.said("max_response");
  if (!response && total) {
    longest_response = std::max(1.0, *total - longest_prompt);
    response_said = in.said("max_total") + " less the prompt";
  }
  if (!prompt) {
    longest_prompt = total ? std::max(1.0, *total - longest_response) : 1024;
    prompt_said = total ? in.said("max_total") + " less the response"
                        : "assumed, the launch has no limit: --set workload.prompt_tokens.max=N";
  }
  if (!response && !total) longest_response = 1024, response_said = "assumed, the launch has no limit";
  if (total && longest_prompt + longest_response > *total) {
    longest_prompt = std::min(longest_prompt, *total - 1);
    longest_response = std::min(longest_response, *total - 1);
    in.set("workload.max_tokens", *total, in.said("max_total"), where_of(in, "max_total"));
  }
  in.set("workload.prompt_tokens.max", longest_prompt, prompt_said, where_of(in, "max_prompt"));
  in.set("workload.response_tokens.max", longest_response, response_said, where_of(in, "max_response"));
  const double top_prompt = in.scenario_number("workload.prompt_tokens.max"),
               top_response = in.scenario_number("workload.response_tokens.max");
  const double cap = in.scenario_number("workload.max_tokens");
  in.set("workload.prompt_tokens.mean", std::max(1.0, std::floor(top_prompt * assumed_prompt_part)),
         "assumed, a quarter of the longest: --set workload.prompt_tokens.mean=N");
  in.set("workload.response_tokens.mean",
         std::max(1.0, std::floor((cap > 0 ? cap - in.scenario_number("workload.prompt_tokens.mean") : top_response) *
                                  assumed_response_part)),
         fmt::format("assumed, a third of {}: --set workload.response_tokens.mean=N",
                     cap > 0 ? "what an assumed prompt leaves" : "the longest"));
  if (const auto prefill = in.number("prefill_tokens"); prefill && *prefill > 0)
    in.set("rollout.max_prefill_tokens", std::max(*prefill, top_prompt),
           *prefill < top_prompt ? in.said("prefill_tokens") + ", longer prompts in chunks" : in.said("prefill_tokens"),
           where_of(in, "prefill_tokens"));
  else in.set("rollout.max_prefill_tokens", std::max(8192.0, top_prompt), "assumed");
}

void write_lengths(RuleOutput& out) {
  const WorkloadSpec& w = out.scenario.workload;
  out.give("sequence", w.prompt_tokens.max + w.response_tokens.max);
  out.give("max_prompt", w.prompt_tokens.max);
  out.give("max_response", w.response_tokens.max);
  out.give("max_total", w.longest());
  out.give("prefill_tokens", static_cast<double>(out.scenario.rollout.max_prefill_tokens));
}

// ---- batches
// ---------------------------------------------------------------------------------------------------------

void read_batches(RuleInput& in) {
  if (trains_only(in)) {
    if (const auto batch = in.number("global_batch"); batch && *batch > 0) {
      in.set("algorithm.prompts", *batch, in.said("global_batch"), where_of(in, "global_batch"));
    } else {
      // One micro-batch of each data rank.
      const double ranks =
          in.scenario_number("cluster.nodes") * in.scenario_number("cluster.gpus_per_node") / train_factor(in);
      in.set("algorithm.prompts", ranks * in.number("micro_sequences").value_or(1),
             fmt::format("{} data ranks x {}", ranks, in.said("micro_sequences")));
    }
    return;
  }
  double prompts = in.number("prompts").value_or(0);
  std::string prompts_said = in.said("prompts");
  const auto mini_prompts = in.number("mini_batch_prompts"), mini_samples = in.number("mini_batch_samples"),
             steps = in.number("mini_batches");
  if (prompts <= 0) {
    // Streamed to training: a step takes so many mini-batches.
    prompts = mini_prompts.value_or(1) * in.number("stream_mini_batches").value_or(1);
    prompts_said = fmt::format("{} x {}", in.said("mini_batch_prompts"), in.said("stream_mini_batches"));
  }
  in.set("algorithm.prompts", prompts, prompts_said, where_of(in, "prompts"));
  const double samples = prompts * in.scenario_number("algorithm.samples_per_prompt");
  double batches = 1;
  std::string said, role;
  if (mini_prompts) {
    role = "mini_batch_prompts";
    batches = prompts / *mini_prompts;
    said = fmt::format("{} prompts / {} prompts of a mini-batch", prompts, *mini_prompts);
  } else if (mini_samples) {
    role = "mini_batch_samples";
    batches = samples / *mini_samples;
    said = fmt::format("{} samples / {} samples of a mini-batch", samples, *mini_samples);
  } else if (steps) {
    role = "mini_batches";
    batches = *steps;
  }
  if (steps && mini_samples && *steps * *mini_samples != samples)
    in.contradict("mini_batches", "two keys say how many optimizer steps there are, and differ",
                  {in.said("mini_batches"), fmt::format("{}: {}", in.said("mini_batch_samples"), said)},
                  "keep one of them");
  if (role.empty()) return;
  const double ours = mini_prompts && batches != std::floor(batches) ? 0 : batches;
  if (ours < 1 || ours != std::floor(ours))
    return in.contradict(
        role, "the batch does not divide into mini-batches", {said + fmt::format(" = {:.3f}", batches), in.said(role)},
        mini_prompts ? "verl's ppo_mini_batch_size counts prompts" : "the batch of a step counts samples, not prompts");
  in.set("algorithm.mini_batches", ours, said.empty() ? in.said(role) : fmt::format("{}: {}", said, in.said(role)),
         where_of(in, role));
}

void write_batches(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (a.name == AlgorithmName::sft) return out.give("global_batch", static_cast<double>(a.prompts));
  out.give("prompts", static_cast<double>(a.prompts));
  if (a.prompts % a.mini_batches == 0) out.give("mini_batch_prompts", static_cast<double>(a.prompts / a.mini_batches));
  out.give("mini_batch_samples", static_cast<double>(a.prompts * a.samples_per_prompt / a.mini_batches));
}

// ---- micro-batches
// ---------------------------------------------------------------------------------------------------

double longest_of(const RuleInput& in) {
  const double both =
      in.scenario_number("workload.prompt_tokens.max") + in.scenario_number("workload.response_tokens.max");
  const double cap = in.scenario_number("workload.max_tokens");
  return cap > 0 ? std::min(cap, both) : both;
}

void read_micro_batches(RuleInput& in) {
  const double cut = in.scenario_number("train.layout.cp") * in.scenario_number("train.layout.ulysses");
  if (in.is_true("packed") || in.is_true("packed_dynamically")) {  // a bin of tokens before cp cuts it
    const std::string role = in.is_true("packed") ? "packed_tokens" : "dynamic_tokens";
    if (const auto tokens = in.number(role))
      return in.set("train.micro_batch_tokens", std::ceil(*tokens / cut),
                    in.said(role) + (cut > 1 ? fmt::format(" / {} ranks of a sequence", cut) : ""), where_of(in, role));
  }
  // What no micro-batch may exceed; or what is collected to, and a longer sample goes alone.
  const std::string tokens_role = in.find("micro_tokens") != nullptr ? "micro_tokens" : "micro_tokens_or_sample";
  const auto tokens = in.number(tokens_role), sequences = in.number("micro_sequences");
  if (in.is_true("dynamic") || (!sequences && tokens && in.find("dynamic") == nullptr)) {
    const double longest = tokens_role == "micro_tokens" ? 0 : std::ceil(longest_of(in) / cut);
    if (tokens && *tokens < longest)
      return in.set("train.micro_batch_tokens", longest,
                    in.said(tokens_role) + ", and a longer sample is a micro-batch of its own",
                    where_of(in, tokens_role));
    if (tokens) return in.set("train.micro_batch_tokens", *tokens, in.said(tokens_role), where_of(in, tokens_role));
    return in.contradict("dynamic", "micro-batches go by tokens, and nothing says how many", {in.said("dynamic")},
                         "give the tokens of a GPU");
  }
  if (!sequences)
    return in.contradict("dynamic", "nothing says how large a micro-batch is", {in.said("dynamic")},
                         "give its sequences, or its tokens with dynamic batches");
  in.set("train.micro_batch_sequences", *sequences, in.said("micro_sequences"), where_of(in, "micro_sequences"));
  in.set("train.micro_batch_tokens", std::ceil(longest_of(in) * *sequences / cut),
         fmt::format("{} sequences of at most {} tokens{}", *sequences, longest_of(in),
                     cut > 1 ? fmt::format(" / {} ranks", cut) : ""));
}

void write_micro_batches(RuleOutput& out) {
  const TrainSpec& t = out.scenario.train;
  const std::int64_t cut = t.layout.cp * t.layout.ulysses;
  const bool by_sequences = t.micro_batch_sequences > 0;
  out.give("dynamic", !by_sequences);
  out.give("packed", !by_sequences);
  out.give("packed_dynamically", false);
  if (!by_sequences) {
    out.give("micro_tokens", static_cast<double>(t.micro_batch_tokens));
    out.give("micro_tokens_or_sample", static_cast<double>(t.micro_batch_tokens));
    out.give("packed_tokens", static_cast<double>(t.micro_batch_tokens * cut));
    return;
  }
  out.give("micro_sequences", static_cast<double>(t.micro_batch_sequences));
}

// ---- recompute, offload
// ----------------------------------------------------------------------------------------------

void read_recompute(RuleInput& in) {
  const RoleValue* const granularity = in.find("recompute_granularity");
  if (in.find("checkpointing") != nullptr && !in.is_true("checkpointing"))
    return in.set("train.recompute", "none", in.said("checkpointing"), where_of(in, "checkpointing"));
  if (granularity != nullptr &&
      (granularity->value == "full" || granularity->value == "selective" || granularity->value == "none"))
    return in.set("train.recompute", granularity->value, granularity->said, granularity->where);
  if (in.is_true("checkpointing"))
    in.set("train.recompute", "full", in.said("checkpointing"), where_of(in, "checkpointing"));
  else if (in.is_true("recompute_activations"))
    in.set("train.recompute", "selective", in.said("recompute_activations"), where_of(in, "recompute_activations"));
  else in.set("train.recompute", "none", "nothing asks for it");
}

void write_recompute(RuleOutput& out) {
  const Recompute r = out.scenario.train.recompute;
  out.give("checkpointing", r != Recompute::none);
  if (r != Recompute::none) out.give("recompute_granularity", std::string(name_of(r)));
}

void read_offload(RuleInput& in) {
  const bool apart = in.scenario_text("placement") == "disaggregated";
  if (in.is_true("offload_layers"))
    return in.set("train.offload", "layerwise", in.said("offload_layers"), where_of(in, "offload_layers"));
  if (in.find("offload_params") == nullptr && in.find("offload_optimizer") == nullptr) {
    if (apart || trains_only(in)) in.set("train.offload", "none", "training keeps its GPUs");  // whatever it says
    return;
  }
  const bool params = in.is_true("offload_params"), optimizer = in.is_true("offload_optimizer");
  std::vector<std::string> said;
  for (const char* role : {"offload_params", "offload_grads", "offload_optimizer"})
    if (!in.said(role).empty()) said.push_back(in.said(role));
  const std::string comment = fmt::format("{}", fmt::join(said, ", "));
  in.set("train.offload", params || optimizer ? "sleep" : "none", comment, where_of(in, "offload_params"));
  // What sleeps alone is an order of its own: verl's, without the steps of what stays.
  if (params != optimizer && !apart && in.scenario_text("rollout.sleep") == "true")
    in.set("transition",
           params ? "[wake_rollout, sync, sleep_train, wake_kv, rollout, sleep_rollout, wake_train]"
                  : "[sleep_optimizer, wake_rollout, sync, wake_kv, rollout, sleep_rollout, wake_train]",
           comment +
               (params ? ": the parameters sleep, the optimizer stays" : ": the optimizer sleeps, the parameters stay"),
           where_of(in, "offload_params"));
}

void write_offload(RuleOutput& out) {
  const Offload o = out.scenario.train.offload;
  out.give("offload_layers", o == Offload::layerwise);
  const auto order = transition_from(out.scenario.transition, o == Offload::sleep, out.scenario.rollout.sleep);
  const bool sleeps = o == Offload::sleep && order;
  out.give("offload_params", sleeps && order->has(TransitionStep::sleep_train));
  out.give("offload_grads", sleeps && order->has(TransitionStep::sleep_train));
  out.give("offload_optimizer",
           sleeps && (order->has(TransitionStep::sleep_optimizer) || order->has(TransitionStep::sleep_moments)));
}

// Megatron's optimizer on the CPU: a switch, and of how much, all of it unless said.
void read_cpu_optimizer(RuleInput& in) {
  if (!in.is_true("optimizer_on_cpu")) return;
  const double fraction = in.number("optimizer_cpu_fraction").value_or(1.0);
  in.set("optimizer.cpu_fraction", fraction,
         in.said("optimizer_on_cpu") +
             (in.said("optimizer_cpu_fraction").empty() ? ", all of it" : ", " + in.said("optimizer_cpu_fraction")),
         where_of(in, "optimizer_on_cpu"));
}

void write_cpu_optimizer(RuleOutput& out) {
  const double fraction = out.scenario.optimizer.cpu_fraction;
  out.give("optimizer_on_cpu", fraction > 0);
  if (fraction > 0) out.give("optimizer_cpu_fraction", fraction);
}

// ---- losses
// ----------------------------------------------------------------------------------------------------------

void read_loss(RuleInput& in) {
  if (trains_only(in)) return;
  const auto clip = in.number("clip"), low = in.number("clip_low"), high = in.number("clip_high");
  if (low || clip)
    in.set("algorithm.clip_low", low.value_or(clip.value_or(0.2)), in.said(low ? "clip_low" : "clip"),
           where_of(in, low ? "clip_low" : "clip"));
  if (high || clip)
    in.set("algorithm.clip_high", high.value_or(clip.value_or(0.2)), in.said(high ? "clip_high" : "clip"),
           where_of(in, high ? "clip_high" : "clip"));
  const double coefficient = in.number("kl_loss_coef").value_or(0), reward = in.number("kl_reward_coef").value_or(0);
  const bool switched = in.find("kl_in_loss") != nullptr,
             in_loss = switched ? in.is_true("kl_in_loss") : coefficient > 0;
  const bool in_reward = in.find("kl_in_reward") != nullptr ? in.is_true("kl_in_reward") : reward > 0;
  if (in.find("kl_loss_coef") == nullptr && in.find("kl_reward_coef") == nullptr) return;
  const std::string said = switched ? in.said("kl_in_loss") : in.said("kl_loss_coef");
  in.set("algorithm.reference", in_loss || in_reward ? "true" : "false",
         in_reward && !in_loss ? in.said(in.find("kl_in_reward") != nullptr ? "kl_in_reward" : "kl_reward_coef") : said,
         where_of(in, switched ? "kl_in_loss" : "kl_loss_coef"));
  in.set("algorithm.kl_coef", in_loss ? coefficient : 0, in_loss ? in.said("kl_loss_coef") : "no KL term in the loss",
         where_of(in, "kl_loss_coef"));
}

void write_loss(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (a.clip_low == a.clip_high) out.give("clip", a.clip_low);
  out.give("clip_low", a.clip_low);
  out.give("clip_high", a.clip_high);
  out.give("kl_in_loss", a.reference);
  out.give("kl_in_reward", false);
  out.give("kl_loss_coef", a.kl_coef);
}

// ---- one step off
// ----------------------------------------------------------------------------------------------------

void read_staleness(RuleInput& in) {
  if (in.is_true("asynchronous"))
    in.set("algorithm.max_staleness", std::max(1.0, in.number("staleness").value_or(1)), in.said("asynchronous"),
           where_of(in, "asynchronous"));
  else if (const auto threshold = in.number("staleness");
           threshold && *threshold > 0 && in.find("asynchronous") == nullptr)
    in.set("algorithm.max_staleness", std::ceil(*threshold), in.said("staleness"), where_of(in, "staleness"));
}

void write_staleness(RuleOutput& out) {
  const std::int64_t lag = out.scenario.algorithm.max_staleness;
  out.give("asynchronous", lag > 0);
  if (lag > 0) out.give("staleness", static_cast<double>(lag));
}

const std::vector<LaunchRule>& rules() {
  static const std::vector<LaunchRule> all = {
      {"model",
       {"model", "max_positions", "model_flavor", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab",
        "experts", "experts_per_token", "expert_ffn", "positions", "swiglu", "untied", "unspelled"},
       {},
       read_model_role,
       write_model_role},
      {"layout",
       {"sequence_parallel", "expert_tp", "shard_ranks", "replicas", "engine_gpus", "engine_dp_attention",
        "engine_attention_dp", "layers_per_virtual_stage", "first_stage_layers", "last_stage_layers"},
       {{"train.layout.sp", {"sequence_parallel"}},
        {"train.layout.etp", {"expert_tp"}},
        {"train.layout.vpp", {"layers_per_virtual_stage"}},
        {"train.layout.fsdp", {"shard_ranks"}},
        {"rollout.layout.tp", {"engine_gpus"}},
        {"rollout.layout.attention_dp", {"engine_attention_dp"}},
        {"train.pipeline_split", {"first_stage_layers", "last_stage_layers"}},
        {"train.pipeline_schedule", {"layers_per_virtual_stage"}}},
       read_layout,
       write_layout},
      {"cluster",
       {"train_nodes", "cluster_nodes", "train_gpus_per_node", "colocated", "rollout_nodes", "rollout_gpus_per_node",
        "rollout_gpus", "rollout_engines"},
       {{"cluster.nodes", {"train_nodes", "cluster_nodes"}},
        {"cluster.gpus_per_node", {"train_gpus_per_node"}},
        {"placement", {"colocated"}},
        {"train.layout.dp", {"train_nodes", "cluster_nodes"}},
        {"rollout.layout.dp", {"colocated"}}},
       read_cluster,
       write_cluster},
      {"lengths",
       {"sequence", "max_prompt", "max_response", "max_total", "prefill_tokens"},
       {{"workload.prompt_tokens.max", {"max_prompt", "sequence"}},
        {"workload.response_tokens.max", {"max_response", "sequence"}},
        {"workload.max_tokens", {"max_total"}},
        {"rollout.max_prefill_tokens", {"prefill_tokens"}}},
       read_lengths,
       write_lengths},
      {"batches",
       {"prompts", "mini_batch_prompts", "mini_batch_samples", "mini_batches", "stream_mini_batches", "global_batch"},
       {{"algorithm.prompts", {"prompts", "global_batch"}},
        {"algorithm.mini_batches", {"mini_batch_prompts", "mini_batch_samples", "mini_batches"}}},
       read_batches,
       write_batches},
      {"micro-batches",
       {"dynamic", "micro_tokens", "micro_tokens_or_sample", "micro_sequences", "packed", "packed_tokens",
        "packed_dynamically", "dynamic_tokens"},
       {{"train.micro_batch_tokens", {"micro_tokens", "micro_tokens_or_sample", "packed_tokens", "dynamic_tokens"}},
        {"train.micro_batch_sequences", {"micro_sequences"}}},
       read_micro_batches,
       write_micro_batches},
      {"recompute",
       {"checkpointing", "recompute_granularity", "recompute_activations"},
       {{"train.recompute", {"checkpointing", "recompute_granularity"}}},
       read_recompute,
       write_recompute},
      {"offload",
       {"offload_params", "offload_grads", "offload_optimizer", "offload_layers"},
       {{"train.offload", {"offload_params", "offload_optimizer", "offload_layers"}},
        {"transition", {"offload_params"}}},
       read_offload,
       write_offload},
      {"CPU optimizer",
       {"optimizer_on_cpu", "optimizer_cpu_fraction"},
       {{"optimizer.cpu_fraction", {"optimizer_on_cpu"}}},
       read_cpu_optimizer,
       write_cpu_optimizer},
      {"loss",
       {"clip", "clip_low", "clip_high", "kl_in_loss", "kl_loss_coef", "kl_in_reward", "kl_reward_coef"},
       {{"algorithm.clip_low", {"clip_low", "clip"}},
        {"algorithm.clip_high", {"clip_high", "clip"}},
        {"algorithm.reference", {"kl_in_loss", "kl_loss_coef"}},
        {"algorithm.kl_coef", {"kl_loss_coef"}}},
       read_loss,
       write_loss},
      {"staleness",
       {"asynchronous", "staleness"},
       {{"algorithm.max_staleness", {"asynchronous", "staleness"}}},
       read_staleness,
       write_staleness},
  };
  return all;
}

}  // namespace

std::span<const LaunchRule> launch_rules() { return rules(); }

bool is_launch_role(const std::string& role) {
  return std::ranges::any_of(
      launch_rules(), [&](const LaunchRule& rule) { return std::ranges::find(rule.roles, role) != rule.roles.end(); });
}

}  // namespace hotbunk
