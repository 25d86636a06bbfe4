#include "rl/adapter.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "rl/manifest.h"
#include "spec/family.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

/// A whole number as one, as PEFT writes lora_alpha.
nlohmann::ordered_json number(double x) {
  const auto whole = static_cast<std::int64_t>(x);
  if (static_cast<double>(whole) == x) return whole;
  return x;
}

}  // namespace

std::vector<ParamSpec> trained_parameters(const ModelSpec& model) {
  std::vector<ParamSpec> out = saved_parameters(model);
  std::erase_if(out, [](const ParamSpec& p) { return p.frozen; });
  return out;
}

std::vector<ParamSpec> saved_parameters(const ModelSpec& model) {
  return model.lora.on() ? adapters_of(model) : parameters_of(model);
}

std::string adapter_tensor(const std::string& parameter) { return "base_model.model." + parameter; }

StoredParameter stored_trained(const ModelSpec& model, const ParamSpec& p) {
  if (!is_adapter(p.role)) return stored(model, p);
  StoredParameter out{.tensor = adapter_tensor(p.name), .shape = p.shape, .cols = p.shape[1], .row_step = p.shape[1]};
  const LoraTarget* matrix = nullptr;
  for (const LoraTarget& t : family_of(model).adapters)
    if (t.b == p.role) matrix = &t;
  if (matrix == nullptr) return out;  // A
  // B has the rows of all matrices that are stored as one, each those of its own.
  const std::string suffix = "lora_B.weight", name = p.name.substr(0, p.name.size() - suffix.size());
  const StoredParameter base = stored(model, {name + "weight", p.shape, matrix->base, p.layer, p.expert});
  out.tensor = adapter_tensor(base.tensor.substr(0, base.tensor.rfind('.') + 1) + suffix);
  const bool transposed = base.col_step > 1;  // (in, out)
  out.shape[0] = base.shape[transposed ? 1 : 0], out.first = base.first / base.row_step * p.shape[1];
  return out;
}

namespace {

/// Whether files have the model's matrices (in, out), as Conv1D has them.
bool transposes(const ModelSpec& model) {
  for (const ParamSpec& p : parameters_of(model))
    if (model.adapts(p.role)) return stored(model, p).col_step > 1;
  return false;
}

}  // namespace

std::string adapter_config_text(const ModelSpec& model, const std::string& base) {
  nlohmann::ordered_json targets = nlohmann::ordered_json::array();
  const std::vector<ParamSpec> adapters = adapters_of(model);
  for (const LoraTarget& t : lora_targets_of(model))
    if (std::ranges::count(adapters, t.b, &ParamSpec::role) > 0 && std::ranges::count(targets, t.module) == 0)
      targets.push_back(t.module);
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"task_type", "CAUSAL_LM"},
                                         {"base_model_name_or_path", base},
                                         {"r", model.lora.rank},
                                         {"lora_alpha", number(model.lora.alpha)},
                                         {"lora_dropout", 0.0},
                                         {"target_modules", std::move(targets)},
                                         {"bias", "none"},
                                         {"fan_in_fan_out", transposes(model)},
                                         {"inference_mode", true},
                                         {"init_lora_weights", true}};
  return json_text(config, 2) + "\n";
}

namespace {

/// A setting of an adapter_config.json under which PEFT computes something else; empty: none.
std::string other_arithmetic(const nlohmann::json& config, const ModelSpec& model) {
  std::vector<const char*> others = {"use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"};
  if (!transposes(model)) others.push_back("fan_in_fan_out");  // PEFT sets it for Conv1D
  for (const char* const key : others)
    if (const auto at = config.find(key); at != config.end() && !at->is_null() && !at->empty() && *at != false)
      return fmt::format("{}: {}", key, json_text(*at));
  if (const auto at = config.find("bias"); at != config.end() && *at != "none")
    return fmt::format("bias: {}", json_text(*at));
  return "";
}

}  // namespace

Result<Checkpoint> open_adapter(const std::filesystem::path& folder, const ModelSpec& model) {
  if (Status ok = verify_manifest(folder); !ok) return fail(std::move(ok.error()));
  const std::filesystem::path config = folder / adapter_file::config;
  const auto text = read_file(config, std::int64_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  const auto json = parse_json(*text, config.string(), {}, "E414");
  if (!json) return tl::unexpected(json.error());
  const auto said = [&](const char* key) {
    return json->is_object() && json->contains(key) && (*json)[key].is_number() ? (*json)[key].get<double>() : 0.0;
  };
  if (said("r") != static_cast<double>(model.lora.rank) || said("lora_alpha") != model.lora.alpha)
    return fail(Diagnostic{.code = "E414",
                           .message = "the adapter was made with another rank or alpha than the scenario says",
                           .where = {config.string()},
                           .notes = {fmt::format("r {}, lora_alpha {}; train.lora has rank {}, alpha {}", said("r"),
                                                 said("lora_alpha"), model.lora.rank, model.lora.alpha)},
                           .help = "set train.lora.rank and train.lora.alpha to the adapter's"});
  if (const std::string other = other_arithmetic(*json, model); !other.empty())
    return fail(Diagnostic{.code = "E414",
                           .message = "the adapter computes something else than is known here",
                           .where = {config.string()},
                           .notes = {other, "what is known: x A^T B^T times lora_alpha / r, for each matrix alike"},
                           .help = "merge it into its model with PEFT, and begin with that"});
  auto checkpoint = Checkpoint::open((folder / adapter_file::weights).string());
  if (!checkpoint) return checkpoint;
  std::set<std::string> known;
  for (const ParamSpec& p : adapters_of(model)) known.insert(stored_trained(model, p).tensor);
  for (const TensorView& t : checkpoint->tensors())
    if (!known.contains(t.name))
      return fail(Diagnostic{
          .code = "E414",
          .message = fmt::format("the adapter has a tensor that no matrix of the scenario takes: {}", t.name),
          .where = {(folder / adapter_file::weights).string()},
          .notes = {fmt::format("train.lora.targets is {}", model.lora.targets)},
          .help = "set train.lora.targets to the adapter's target_modules"});
  for (const ParamSpec& p : adapters_of(model)) {
    const auto tensor = checkpoint->require(stored_trained(model, p));
    if (!tensor) return fail(tensor.error());
    if (Status ok = check_finite(*tensor); !ok) return fail(std::move(ok.error()));
  }
  return checkpoint;
}

}  // namespace hotbunk
