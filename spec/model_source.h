// The `model:` key of a scenario: a catalogue name, a path, or a map of config.json keys.
#pragma once
#include <filesystem>
#include <string>

#include "base/diagnostic.h"
#include "spec/model.h"
#include "spec/yaml_tree.h"

namespace hotbunk {

/// `folder`: where relative paths start. E209 (no such model), E202 (unknown key of a map), E204 (twice the same key),
/// E205 (wrong type), and what model_config.h reports.
Result<ModelSpec> read_model(const YamlNode& node, const std::filesystem::path& folder);

/// `path` as it is, or below `folder` when it exists there.
std::filesystem::path resolve_path(const std::string& path, const std::filesystem::path& folder);

}  // namespace hotbunk
