// ModelSpec from and to a Hugging Face config.json, in the spelling of transformers 4 (rope_theta, rope_scaling,
// torch_dtype) or 5 (rope_parameters, dtype).
#pragma once
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "base/dtype.h"
#include "spec/model.h"

namespace hotbunk {

/// Where a key of the config stands, for messages.
using KeyLocator = std::function<SourceLocation(std::string_view key)>;

/// Errors E410 (missing), E411 (type or range), E412 (architecture or feature that hotbunk does not know), E413 (sizes
/// that contradict each other or are absurd); all of them collected.
Result<ModelSpec> model_from_json(const nlohmann::json& config, const std::string& name, const KeyLocator& locate);
Result<ModelSpec> model_from_text(std::string_view text, const std::string& file, const std::string& name);

/// `path`: a model folder, which must hold safetensors (E420), or a config.json, beside which they may lie: without
/// them `weights_path` stays empty and a run starts from random weights.
Result<ModelSpec> load_model(const std::filesystem::path& path);

/// The config as transformers 5 writes it; model_from_json gives back the same ModelSpec (name and weights_path aside).
nlohmann::json config_of(const ModelSpec&, DType dtype);
/// config.json's content, with a trailing newline.
std::string config_text(const ModelSpec&, DType dtype);

/// Every key that model_from_json reads or knows to be without meaning here: what a `model:` map may contain.
const std::vector<std::string>& config_keys();

}  // namespace hotbunk
