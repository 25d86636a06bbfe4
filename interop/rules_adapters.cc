// Rules of low-rank adapters: PEFT's matrices, and Megatron-Bridge's modules, of which two are several matrices at
// once.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>
#include <vector>

#include "interop/rule_parts.h"
#include "interop/settings.h"
#include "spec/model.h"
#include "spec/scenario_keys.h"

namespace hotbunk::rules {
namespace {

/// A module of Megatron's and the matrices of a checkpoint that it is. `fused`: of its adapters of type lora, where q,
/// k and v, and gate and up, are one module with one A; the others are of canonical_lora, which has an A for each.
struct BridgeModule {
  std::string_view name;
  bool fused, canonical;
  std::vector<std::string_view> matrices;
};
/// Source: Megatron-Bridge's LoRA and CanonicalLoRA, as verl/trainer/config/model/hf_model.yaml lists them.
const std::vector<BridgeModule>& bridge_modules() {
  static const std::vector<BridgeModule> all = {{"linear_qkv", true, false, {"q_proj", "k_proj", "v_proj"}},
                                                {"linear_q", false, true, {"q_proj"}},
                                                {"linear_k", false, true, {"k_proj"}},
                                                {"linear_v", false, true, {"v_proj"}},
                                                {"linear_proj", true, true, {"o_proj"}},
                                                {"linear_fc1", true, false, {"gate_proj", "up_proj"}},
                                                {"linear_fc1_gate", false, true, {"gate_proj"}},
                                                {"linear_fc1_up", false, true, {"up_proj"}},
                                                {"linear_fc2", true, true, {"down_proj"}}};
  return all;
}

/// As train.lora.targets has them: in their order of a layer, all-linear where there are all.
std::string targets_of(const std::vector<std::string>& matrices) {
  std::vector<std::string> out;
  for (const LoraTarget& t : lora_targets)
    if (std::ranges::find(matrices, t.module) != matrices.end()) out.emplace_back(t.module);
  for (const std::string& other : matrices)  // that no layer has: the scenario's own rules say so
    if (std::ranges::find(lora_targets, other, &LoraTarget::module) == lora_targets.end()) out.push_back(other);
  if (out.size() == lora_targets.size()) return "all-linear";
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
std::vector<std::string> modules_for(const std::vector<std::string>& matrices, bool fused) {
  std::vector<std::string> out;
  for (const BridgeModule& m : bridge_modules())
    if ((fused ? m.fused : m.canonical) && std::ranges::any_of(m.matrices, [&](const auto& one) {
          return std::ranges::find(matrices, one) != matrices.end();
        }))
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
  std::vector<std::string> matrices;
  bool shared = false;
  for (const std::string& name : names) {
    const auto at = std::ranges::find(bridge_modules(), name, &BridgeModule::name);
    if (at == bridge_modules().end()) {
      matrices.push_back(name);
      continue;
    }
    matrices.insert(matrices.end(), at->matrices.begin(), at->matrices.end());
    shared |= at->matrices.size() > 1;
  }
  in.set("train.lora.targets", targets_of(matrices),
         said->said + (shared ? "; q, k and v, and gate and up, have one A together there, each its own here" : ""),
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
  out.give("adapter_modules", list(modules_for(matrices, false)));
  // An empty list is all of them.
  out.give("adapter_fused_modules", list(all ? std::vector<std::string>() : modules_for(matrices, true)));
  if (!lora.adapter.empty()) out.give("adapter_folder", lora.adapter);
  // What a scenario's engines are sent are merged weights, and verl's vLLM reads the frozen ones from the checkpoint.
  out.give("adapters_merged", true);
  out.give("adapter_base_format", std::string("safetensors"));
}

}  // namespace hotbunk::rules
