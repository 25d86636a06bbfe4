// Rules of machines, placement and layouts.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "interop/rule_parts.h"
#include "spec/names.h"

namespace hotbunk::rules {

double train_factor(const RuleInput& in) {
  double product = 1;
  for (const char* key : {"cp", "ulysses", "tp", "pp"})
    product *= in.scenario_number(std::string("train.layout.") + key);
  return std::max(product, 1.0);
}
static double engine_ranks(const RuleInput& in) {
  double product = 1;
  for (const char* key : {"cp", "tp", "pp"}) product *= in.scenario_number(std::string("rollout.layout.") + key);
  return std::max(product, 1.0);
}

/// Training and rollout on GPUs of their own, in one cluster of equal nodes. `nodes`: as the launch counts them, all or
/// training's (`total`).
static void read_two_sides(RuleInput& in, const std::string& nodes_role, double nodes, double per_node, bool total) {
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
         in.where(nodes_role));
  in.set("placement", "disaggregated", why, in.where("colocated"));
  if (std::fmod(training, train_factor(in)) != 0)
    return in.contradict(nodes_role, "training's GPUs do not divide by its layout",
                         {fmt::format("{} GPUs, tp x cp x pp x ulysses = {}", training, train_factor(in))},
                         "change the layout or the GPUs");
  in.set("train.layout.dp", training / train_factor(in), fmt::format("{} GPUs of training", training));
  in.set("rollout.layout.dp", "auto", "as many engines as the rest holds");
}

void read_cluster(RuleInput& in) {
  if (!in.chosen.contains("cluster.gpu"))
    in.set("cluster.gpu", "h100-sxm-80gb", "assumed, a launch names no GPU: --set cluster.gpu=NAME");
  const double per_node = in.number("train_gpus_per_node").value_or(8);
  const bool total = in.find("cluster_nodes") != nullptr;
  const std::string nodes_role = total ? "cluster_nodes" : "train_nodes";
  const double nodes = in.number(nodes_role).value_or(1);
  // OpenRLHF's engines stay out of the colocated placement group where it trains asynchronously (train_ppo_ray.py).
  const bool engines_apart =
      in.scenario_text("profile") == "openrlhf" && in.is_true("asynchronous") && in.find("rollout_engines") != nullptr;
  const bool disaggregated =
      in.find("colocated") != nullptr && (!in.is_true("colocated") || engines_apart) && !in.trains_only();
  in.set("cluster.gpus_per_node", per_node, in.said("train_gpus_per_node"), in.where("train_gpus_per_node"));
  if (disaggregated) return read_two_sides(in, nodes_role, nodes, per_node, total);
  in.set("cluster.nodes", nodes, in.said(nodes_role), in.where(nodes_role));
  in.set("train.layout.dp", "auto", "what the other dimensions leave of the ranks");
  if (in.trains_only()) return;
  in.set("rollout.layout.dp", "auto", "as many engines as the ranks hold");
  if (const auto engines = in.number("rollout_engines"))
    if (*engines * engine_ranks(in) != nodes * per_node)
      in.contradict(
          "rollout_engines", "engines that share the GPUs with training do not cover them",
          {fmt::format("{}: {} engines x {} GPUs = {}; training has {} x {} = {}", in.said("rollout_engines"), *engines,
                       engine_ranks(in), *engines * engine_ranks(in), nodes, per_node, nodes * per_node)},
          "change the number of engines or their tensor parallel");
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

/// Megatron without its distributed optimizer has all of the optimizer's state on every data rank; with instances of it
/// the data ranks of one share a whole.
static void read_distributed_optimizer(RuleInput& in) {
  if (in.find("distributed_optimizer") == nullptr || in.scenario_text("train.engine") != "megatron") return;
  const std::string said = in.said("distributed_optimizer");
  if (!in.is_true("distributed_optimizer"))
    return in.set("train.layout.fsdp", 1, said + ": every data rank has all of the optimizer's state",
                  in.where("distributed_optimizer"));
  const double instances = in.number("optimizer_instances").value_or(1);
  if (instances <= 1) return;
  const double ranks = in.number("train_nodes").value_or(1) * in.number("train_gpus_per_node").value_or(8),
               model = in.scenario_number("train.layout.tp") * in.scenario_number("train.layout.pp"),
               data = ranks / model;
  if (std::fmod(data, instances) != 0)
    return in.contradict(
        "optimizer_instances", "instances of the distributed optimizer do not divide the data ranks",
        {fmt::format("{} GPUs / (tp x pp = {}) = {} data ranks, {} instances", ranks, model, data, instances)},
        "change the instances to a divisor of the data ranks");
  in.set("train.layout.fsdp", data / instances, in.said("optimizer_instances"), in.where("optimizer_instances"));
}

/// slime's FSDP shards over dp of its mesh (dp, cp): a rank of each cp has a copy (slime/backends/fsdp_utils).
static void read_shard_group(RuleInput& in) {
  if (in.scenario_text("profile") == "slime-fsdp" && in.scenario_number("train.layout.cp") > 1)
    in.set("train.layout.shard_over", "[dp]", "slime's FSDP shards over dp alone: context-parallel ranks have copies");
}

static bool has_experts(const RuleInput& in) { return in.model && in.model->moe; }

static void read_engine_layout(RuleInput& in) {
  if (const auto gpus = in.number("engine_gpus")) {
    const double stages = in.scenario_number("rollout.layout.pp");
    in.set("rollout.layout.tp", *gpus / stages, in.said("engine_gpus"), in.where("engine_gpus"));
  }
  if (const auto each = in.number("engine_attention_dp"); each && in.is_true("engine_dp_attention"))
    in.set("rollout.layout.attention_dp", *each, in.said("engine_attention_dp"), in.where("engine_attention_dp"));
  // vLLM's data-parallel engines: groups of tp ranks with sequences of their own, experts spread over all of them. What
  // has no experts, and SGLang without attention of its own for each, is so many engines of tp ranks: nothing changes.
  if (const auto each = in.number("engine_tp")) {
    const auto groups = in.number("engine_data_parallel");
    const bool one_engine = groups && *groups > 1 && has_experts(in) && in.scenario_text("rollout.engine") == "vllm";
    if (one_engine) {
      in.set("rollout.layout.tp", *each * *groups,
             fmt::format("{} x tensor parallel {}: ranks of one engine", in.said("engine_data_parallel"), *each),
             in.where("engine_data_parallel"));
      in.set("rollout.layout.attention_dp", *groups, in.said("engine_data_parallel"), in.where("engine_data_parallel"));
    } else {
      in.set("rollout.layout.tp", *each, in.said("engine_tp"), in.where("engine_tp"));
    }
  }
}

/// Virtual stages, and how many layers the first and the last stage have.
static void read_stages(RuleInput& in) {
  const double pp = in.scenario_number("train.layout.pp");
  if (!in.model || pp <= 1) return;
  const double layers = static_cast<double>(in.model->layers);
  double vpp = in.scenario_number("train.layout.vpp");
  if (const auto each = in.number("layers_per_virtual_stage"); each && *each > 0) {
    // Megatron adds the embedding and the loss that it counts as layers before it divides.
    double counted = layers;
    for (const char* end : {"embedding", "loss"})
      counted += in.scenario_text(fmt::format("train.account_for_{}_in_pipeline_split", end)) == "true" ? 1 : 0;
    vpp = counted / pp / *each;
    in.set("train.layout.vpp", vpp, in.said("layers_per_virtual_stage"), in.where("layers_per_virtual_stage"));
  }
  if (vpp > 1) in.set("train.pipeline_schedule", "interleaved", "virtual stages");
  const auto first = in.number("first_stage_layers"), last = in.number("last_stage_layers");
  const double ends = (first ? 1 : 0) + (last ? 1 : 0), rest = layers - first.value_or(0) - last.value_or(0);
  const double chunks = pp - ends;
  if (ends > 0 && (rest < 0 || (chunks > 0 && std::fmod(rest, chunks) != 0) || (chunks == 0 && rest != 0)))
    return in.contradict(first ? "first_stage_layers" : "last_stage_layers",
                         "the stages between do not divide the layers",
                         {fmt::format("{} layers - {} = {} for {} stages", layers, layers - rest, rest, chunks),
                          in.said("first_stage_layers") + (first && last ? ", " : "") + in.said("last_stage_layers")},
                         "change the layers of the first or last stage");
  for (const auto& [role, key, held] :
       {std::tuple("first_stage_layers", "train.num_layers_in_first_pipeline_stage", first),
        std::tuple("last_stage_layers", "train.num_layers_in_last_pipeline_stage", last)})
    if (held) in.set(key, *held, in.said(role), in.where(role));
}

void read_layout(RuleInput& in) {
  read_distributed_optimizer(in);
  const double tp = in.scenario_number("train.layout.tp");
  if (in.find("sequence_parallel") != nullptr)
    in.set("train.layout.sp", in.is_true("sequence_parallel") && tp > 1 ? "true" : "false",
           in.said("sequence_parallel") + (in.is_true("sequence_parallel") && tp == 1 ? ", of one rank" : ""),
           in.where("sequence_parallel"));
  const bool moe = has_experts(in);
  if (const auto etp = in.number("expert_tp"); etp && moe)
    in.set("train.layout.etp", *etp, in.said("expert_tp"), in.where("expert_tp"));
  else if (moe && in.scenario_text("train.engine") == "megatron" && tp > 1)
    in.set("train.layout.etp", tp, "Megatron's default: experts are cut as tp cuts the rest");
  if (const auto shard = in.number("shard_ranks"); shard && in.number("replicas").value_or(1) > 1)
    in.set("train.layout.fsdp", *shard < 0 ? -1 : *shard * in.scenario_number("train.layout.cp"),
           in.said("shard_ranks"), in.where("shard_ranks"));
  read_shard_group(in);
  read_engine_layout(in);
  read_stages(in);
}

void write_layout(RuleOutput& out) {
  const TrainLayout& t = out.scenario.train.layout;
  const RolloutLayout& r = out.scenario.rollout.layout;
  out.give("sequence_parallel", t.sp);
  const std::int64_t data = t.dp * t.cp * t.ulysses;
  out.give("distributed_optimizer", t.fsdp != 1);
  if (t.fsdp > 1 && t.fsdp < data) {
    const std::int64_t instances = data / t.fsdp;
    out.give("optimizer_instances", static_cast<double>(instances));
  }
  if (out.scenario.model.moe) out.give("expert_tp", static_cast<double>(t.etp));
  out.give("engine_gpus", static_cast<double>(r.tp * r.pp));
  if (r.attention_dp > 1) {
    out.give("engine_dp_attention", true);
    out.give("engine_attention_dp", static_cast<double>(r.attention_dp));
  }
  // As it is read above: of one engine the groups and the ranks of each.
  const bool in_groups =
      r.attention_dp > 1 && out.scenario.model.moe && out.scenario.rollout.engine == RolloutEngine::vllm;
  out.give("engine_tp", static_cast<double>(in_groups ? r.tp / r.attention_dp : r.tp));
  if (in_groups) out.give("engine_data_parallel", static_cast<double>(r.attention_dp));
  const TrainSpec& train = out.scenario.train;
  const std::int64_t counted =
      out.scenario.model.layers + (train.account_for_embedding ? 1 : 0) + (train.account_for_loss ? 1 : 0);
  const std::int64_t layers_each = counted / t.pp / t.vpp;
  if (t.vpp > 1) out.give("layers_per_virtual_stage", static_cast<double>(layers_each));
  if (train.first_stage_layers > 0) out.give("first_stage_layers", static_cast<double>(train.first_stage_layers));
  if (train.last_stage_layers > 0) out.give("last_stage_layers", static_cast<double>(train.last_stage_layers));
  // Of a list the first and the last stage alone have keys, where the stages between them are alike.
  const std::vector<std::int64_t>& split = train.pipeline_split;
  const bool even_between = split.size() < 4 || std::all_of(split.begin() + 1, split.end() - 1,
                                                            [&](auto layers) { return layers == split[1]; });
  if (split.size() < 2 || t.vpp > 1 || !even_between) return;
  out.give("first_stage_layers", static_cast<double>(split.front()));
  out.give("last_stage_layers", static_cast<double>(split.back()));
}

}  // namespace hotbunk::rules
