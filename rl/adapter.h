// Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "spec/model.h"
#include "spec/safetensors.h"
#include "spec/stored_parameter.h"

namespace hotbunk {

namespace adapter_file {
inline constexpr const char *config = "adapter_config.json", *weights = "adapter_model.safetensors";
}

/// What of a model is trained, and what checkpoints are of: its adapters, or all of it.
std::vector<ParamSpec> trained_parameters(const ModelSpec&);
/// What a checkpoint of training has: these, and what is frozen by name beside them.
std::vector<ParamSpec> saved_parameters(const ModelSpec&);

/// "base_model.model.NAME": a parameter's name in PEFT's file. Source: peft.get_peft_model_state_dict.
std::string adapter_tensor(const std::string& parameter);

/// Where a checkpoint has a parameter that is trained: as adapter_tensor() says, or as files of the model do.
StoredParameter stored_trained(const ModelSpec&, const ParamSpec&);

/// What adapter_config.json says of the model's adapters; `base`: where PEFT finds the model itself.
std::string adapter_config_text(const ModelSpec&, const std::string& base);

/// Opens the adapters of a folder: E421 where it has a manifest that does not hold, E40x where tensors are missing, of
/// other shapes or not finite, E414 where they were made with another rank or alpha than the scenario's.
Result<Checkpoint> open_adapter(const std::filesystem::path& folder, const ModelSpec&);

}  // namespace hotbunk
