// Rules of what keeps training in memory: recompute, offload, the optimizer on the CPUs.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "interop/rule_parts.h"
#include "spec/names.h"
#include "spec/recompute_modules.h"
#include "spec/transition.h"

namespace hotbunk::rules {

std::vector<std::string> listed(std::string text) {
  for (char& c : text)
    if (std::string_view("[](),'\"").find(c) != std::string_view::npos) c = ' ';
  std::istringstream in(text);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

namespace {

/// Of selective recomputation, by Megatron-core's names, which are ours.
void read_recompute_modules(RuleInput& in) {
  const RoleValue* const modules = in.find("recompute_modules");
  if (modules == nullptr || in.scenario_text("train.recompute") != "selective") return;
  in.set("train.recompute_modules", fmt::format("[{}]", fmt::join(listed(modules->value), ", ")), modules->said,
         modules->where);
}

void read_recompute_kind(RuleInput& in) {
  const RoleValue* const granularity = in.find("recompute_granularity");
  if (in.find("checkpointing") != nullptr && !in.is_true("checkpointing"))
    return in.set("train.recompute", "none", in.said("checkpointing"), in.where("checkpointing"));
  if (granularity != nullptr &&
      (granularity->value == "full" || granularity->value == "selective" || granularity->value == "none"))
    return in.set("train.recompute", granularity->value, granularity->said, granularity->where);
  if (in.is_true("checkpointing"))
    in.set("train.recompute", "full", in.said("checkpointing"), in.where("checkpointing"));
  else if (in.is_true("recompute_activations"))
    in.set("train.recompute", "selective", in.said("recompute_activations"), in.where("recompute_activations"));
  else in.set("train.recompute", "none", "nothing asks for it");
}

}  // namespace

namespace {

/// verl's order of sleep and wake, as a list, without the steps of what stays.
std::string order_text(bool params, bool optimizer, bool rollout) {
  std::vector<std::string_view> steps;
  for (const TransitionStep step : order_where("verl", params, optimizer, rollout)) steps.push_back(name_of(step));
  return fmt::format("[{}]", fmt::join(steps, ", "));
}

}  // namespace

void read_recompute(RuleInput& in) {
  read_recompute_kind(in);
  read_recompute_modules(in);
}

void write_recompute(RuleOutput& out) {
  const Recompute r = out.scenario.train.recompute;
  out.give("checkpointing", r != Recompute::none);
  if (r != Recompute::none) out.give("recompute_granularity", std::string(name_of(r)));
  // mlp_act is ours alone.
  if (std::string modules = out.scenario.train.recompute_modules;
      !modules.empty() &&
      modules.find(recompute_module_names[static_cast<std::size_t>(RecomputeModule::mlp_act)]) == std::string::npos) {
    std::ranges::replace(modules, '-', ',');
    out.give("recompute_modules", fmt::format("[{}]", modules));
  }
}

void read_offload(RuleInput& in) {
  const bool apart = in.scenario_text("placement") == "disaggregated";
  if (in.is_true("offload_layers")) {
    in.set("train.offload", "layerwise", in.said("offload_layers"), in.where("offload_layers"));
    // State that lives on the host has nothing to put to sleep: the system's order without those steps.
    if (!apart && !in.trains_only() && in.scenario_text("profile") != "hotbunk")
      in.set("transition", order_text(false, false, in.scenario_text("rollout.sleep") == "true"),
             in.said("offload_layers") + ": parameters and optimizer live on the host, the engine alone sleeps",
             in.where("offload_layers"));
    return;
  }
  if (in.find("offload_params") == nullptr && in.find("offload_optimizer") == nullptr) {
    if (apart || in.trains_only()) in.set("train.offload", "none", "training keeps its GPUs");  // whatever it says
    return;
  }
  const bool params = in.is_true("offload_params"), optimizer = in.is_true("offload_optimizer");
  std::vector<std::string> said;
  for (const char* role : {"offload_params", "offload_grads", "offload_optimizer"})
    if (!in.said(role).empty()) said.push_back(in.said(role));
  const std::string comment = fmt::format("{}", fmt::join(said, ", "));
  in.set("train.offload", params || optimizer ? "sleep" : "none", comment, in.where("offload_params"));
  // What sleeps alone is an order of its own: verl's, without the steps of what stays.
  if (params != optimizer && !apart && in.scenario_text("rollout.sleep") == "true")
    in.set("transition", order_text(params, optimizer, true),
           comment +
               (params ? ": the parameters sleep, the optimizer stays" : ": the optimizer sleeps, the parameters stay"),
           in.where("offload_params"));
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
         in.where("optimizer_on_cpu"));
}

void write_cpu_optimizer(RuleOutput& out) {
  const double fraction = out.scenario.optimizer.cpu_fraction;
  out.give("optimizer_on_cpu", fraction > 0);
  if (fraction > 0) out.give("optimizer_cpu_fraction", fraction);
}

}  // namespace hotbunk::rules
