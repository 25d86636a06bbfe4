#include "rl/adapter.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "rl/manifest.h"
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
  return model.lora.on() ? adapters_of(model) : parameters_of(model);
}

std::string adapter_tensor(const std::string& parameter) { return "base_model.model." + parameter; }

StoredParameter stored_trained(const ModelSpec& model, const ParamSpec& p) {
  if (!is_adapter(p.role)) return stored(model, p);
  return {.tensor = adapter_tensor(p.name), .shape = p.shape, .cols = p.shape[1]};
}

std::string adapter_config_text(const ModelSpec& model, const std::string& base) {
  nlohmann::ordered_json targets = nlohmann::ordered_json::array();
  const std::vector<ParamSpec> adapters = adapters_of(model);
  for (const LoraTarget& t : lora_targets)
    if (std::ranges::count(adapters, t.a, &ParamSpec::role) > 0) targets.push_back(t.module);
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"task_type", "CAUSAL_LM"},
                                         {"base_model_name_or_path", base},
                                         {"r", model.lora.rank},
                                         {"lora_alpha", number(model.lora.alpha)},
                                         {"lora_dropout", 0.0},
                                         {"target_modules", std::move(targets)},
                                         {"bias", "none"},
                                         {"fan_in_fan_out", false},
                                         {"inference_mode", true},
                                         {"init_lora_weights", true}};
  return json_text(config, 2) + "\n";
}

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
  auto checkpoint = Checkpoint::open((folder / adapter_file::weights).string());
  if (!checkpoint) return checkpoint;
  for (const ParamSpec& p : adapters_of(model)) {
    const auto tensor = checkpoint->require(adapter_tensor(p.name), p.shape);
    if (!tensor) return fail(tensor.error());
    if (Status ok = check_finite(*tensor); !ok) return fail(std::move(ok.error()));
  }
  return checkpoint;
}

}  // namespace hotbunk
