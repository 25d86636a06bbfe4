// Rules of low-rank adapters: PEFT's matrices, and Megatron-Bridge's modules, of which two are several matrices at
// once.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "interop/rule_parts.h"
#include "interop/settings.h"
#include "spec/family.h"
#include "spec/model.h"
#include "spec/scenario_keys.h"

namespace hotbunk::rules {
namespace {

/// A module of Megatron's and the matrices of a checkpoint that it is. `fused`: of its adapters of type lora, where q,
/// k and v, and gate and up, are one module with one A; the others are of canonical_lora, which has an A for each.
/// `latent`: of models that have latent attention, or of those that have not; none: of both.
struct BridgeModule {
  std::string_view name;
  bool fused, canonical;
  std::vector<std::string_view> matrices;
  std::optional<bool> latent = {};
};
/// Source: Megatron-Bridge's LoRA and CanonicalLoRA, as verl/trainer/config/model/hf_model.yaml lists them; of latent
/// attention the modules of Megatron-Core's MLASelfAttention, as Megatron-Bridge's DeepSeek bridges map them.
const std::vector<BridgeModule>& bridge_modules() {
  static const std::vector<BridgeModule> all = {{"linear_qkv", true, false, {"q_proj", "k_proj", "v_proj"}, false},
                                                {"linear_q", false, true, {"q_proj"}, false},
                                                {"linear_k", false, true, {"k_proj"}, false},
                                                {"linear_v", false, true, {"v_proj"}, false},
                                                {"linear_q_proj", true, true, {"q_proj"}, true},
                                                {"linear_q_down_proj", true, true, {"q_a_proj"}, true},
                                                {"linear_q_up_proj", true, true, {"q_b_proj"}, true},
                                                {"linear_kv_down_proj", true, true, {"kv_a_proj_with_mqa"}, true},
                                                {"linear_kv_up_proj", true, true, {"kv_b_proj"}, true},
                                                {"linear_proj", true, true, {"o_proj"}},
                                                {"linear_fc1", true, false, {"gate_proj", "up_proj"}},
                                                {"linear_fc1_gate", false, true, {"gate_proj"}},
                                                {"linear_fc1_up", false, true, {"up_proj"}},
                                                {"linear_fc2", true, true, {"down_proj"}}};
  return all;
}

bool is_module_of(const BridgeModule& module, const ModelSpec& model) {
  return module.latent.value_or(model.mla.has_value()) == model.mla.has_value();
}

bool has_matrix(const BridgeModule& module, const ModelSpec& model, const std::string& matrix) {
  return is_module_of(module, model) && std::ranges::find(module.matrices, matrix) != module.matrices.end();
}

/// As train.lora.targets has them: in the order of the model's layer, all-linear where there are all of its family's.
std::string targets_of(const std::vector<std::string>& matrices, const std::optional<ModelSpec>& model) {
  std::vector<std::string_view> family, out;
  for (const LoraTarget& t : model ? family_of(*model).adapters : std::span<const LoraTarget>(lora_targets))
    if (std::ranges::find(family, t.module) == family.end()) family.push_back(t.module);
  for (const std::string_view module : family)
    if (std::ranges::find(matrices, module) != matrices.end()) out.push_back(module);
  if (out.size() == family.size()) return "all-linear";
  for (const std::string& other : matrices)  // that no layer has: the scenario's own rules say so
    if (std::ranges::find(family, other) == family.end()) out.push_back(other);
  return fmt::format("[{}]", fmt::join(out, ", "));
}

/// Those that the model has, each once.
std::vector<std::string> matrices_of(const ModelSpec& model) {
  std::vector<std::string> out;
  for (const LoraTarget& t : lora_targets_of(model))
    if (model.adapts(t.base) && std::ranges::find(out, t.module) == out.end()) out.emplace_back(t.module);
  return out;
}

/// The modules of one kind that have any of the matrices: of fused ones some may have others, too.
std::vector<std::string> modules_for(const ModelSpec& model, const std::vector<std::string>& matrices, bool fused) {
  std::vector<std::string> out;
  for (const BridgeModule& m : bridge_modules())
    if ((fused ? m.fused : m.canonical) &&
        std::ranges::any_of(matrices, [&](const std::string& one) { return has_matrix(m, model, one); }))
      out.emplace_back(m.name);
  return out;
}

void read_targets(RuleInput& in) {
  const RoleValue* said = nullptr;
  for (const char* role : {"adapter_modules", "adapter_fused_modules", "adapter_matrix_names", "adapter_matrices"})
    if (said == nullptr) said = in.find(role);
  if (in.is_true("adapters_of_all"))
    return in.set("train.lora.targets", "all-linear", in.said("adapters_of_all"), in.where("adapters_of_all"));
  const std::vector<std::string> names = said == nullptr ? std::vector<std::string>() : listed(said->value);
  if (names.empty() || names == std::vector<std::string>{"all-linear"})
    return in.set("train.lora.targets", "all-linear", said == nullptr ? "nothing else is said" : said->said,
                  in.where("adapter_rank"));
  std::vector<std::string> matrices, absent;
  bool shared = false;
  for (const std::string& name : names) {
    const auto at = std::ranges::find(bridge_modules(), name, &BridgeModule::name);
    if (at == bridge_modules().end()) {
      matrices.push_back(name);
      continue;
    }
    // Names that no module of the model has get no adapter there; the default list is one of another attention's.
    if (in.model && !is_module_of(*at, *in.model)) {
      absent.push_back(name);
      continue;
    }
    matrices.insert(matrices.end(), at->matrices.begin(), at->matrices.end());
    shared |= at->matrices.size() > 1;
  }
  in.set("train.lora.targets", targets_of(matrices, in.model),
         said->said + (shared ? "; q, k and v, and gate and up, have one A together there, each its own here" : "") +
             (absent.empty() ? "" : fmt::format("; the model has no {}", fmt::join(absent, ", "))),
         said->where);
}

}  // namespace

void read_adapters(RuleInput& in) {
  if (in.find("adapters_on") != nullptr && !in.is_true("adapters_on")) return;
  const auto rank = in.number("adapter_rank");
  if (!rank || *rank <= 0) return;
  const bool apart = in.find("adapters_merged") == nullptr || !in.is_true("adapters_merged");
  in.set(
      "train.lora.rank", *rank,
      in.said("adapter_rank") + (apart ? "; engines are sent merged weights here, whatever they are sent there" : ""),
      in.where("adapter_rank"));
  if (const auto alpha = in.number("adapter_alpha"))
    in.set("train.lora.alpha", *alpha, in.said("adapter_alpha"), in.where("adapter_alpha"));
  read_targets(in);
  if (const RoleValue* const folder = in.find("adapter_folder"); folder != nullptr && !folder->value.empty())
    in.set("train.lora.adapter", yaml_text(folder->value), folder->said, folder->where);
}

std::vector<std::string> without_bridge_module(const ModelSpec& model) {
  std::vector<std::string> out = matrices_of(model);
  std::erase_if(out, [&](const std::string& matrix) {
    return std::ranges::any_of(bridge_modules(), [&](const BridgeModule& m) { return has_matrix(m, model, matrix); });
  });
  return out;
}

void write_adapters(RuleOutput& out) {
  const LoraSpec& lora = out.scenario.model.lora;
  if (!lora.on()) return;
  const std::vector<std::string> matrices = matrices_of(out.scenario.model);
  const bool all = lora.targets == "all-linear";
  const auto list = [](const std::vector<std::string>& names) { return fmt::format("[{}]", fmt::join(names, ",")); };
  out.give("adapters_on", true);
  out.give("adapter_rank", static_cast<double>(lora.rank));
  out.give("adapter_alpha", lora.alpha);
  out.give("adapters_of_all", all);
  out.give("adapter_matrices", all ? "all-linear" : list(matrices));
  if (!all) out.give("adapter_matrix_names", list(matrices));
  out.give("adapter_kind", std::string("canonical"));
  out.give("adapter_modules", list(modules_for(out.scenario.model, matrices, false)));
  // An empty list is all of them.
  out.give("adapter_fused_modules",
           list(all ? std::vector<std::string>() : modules_for(out.scenario.model, matrices, true)));
  if (!lora.adapter.empty()) out.give("adapter_folder", lora.adapter);
  // What a scenario's engines are sent are merged weights, and verl's vLLM reads the frozen ones from the checkpoint.
  out.give("adapters_merged", true);
  out.give("adapter_base_format", std::string("safetensors"));
}

}  // namespace hotbunk::rules
