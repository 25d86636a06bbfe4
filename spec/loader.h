// Scenario files → Scenario. Every diagnostic of a file is collected before giving up, each with file, line and key.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

/// `overrides` are --set arguments, "a.b.c=value": the value is YAML, missing maps are made, later ones win.
/// The scenario is complete (every default filled in, also the derived ones) and validated (validate.h).
/// Errors: E1xx files, E2xx scenario, E41x model config. Relative paths in a file count from its folder, then from the
/// working directory.
Result<Scenario> load_scenario(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

/// The text of a scenario file, of at most 4 MiB; "-" is standard input, which can be read once. E10x.
Result<std::string> read_scenario(const std::filesystem::path& path);

/// The same from text; `file` is the name in messages, and its folder is where relative paths start.
Result<Scenario> load_scenario_text(const std::string& text, const std::string& file,
                                    const std::vector<std::string>& overrides = {});

/// The scenario with the paths of weights, data and profile made absolute: its file then works from anywhere.
Scenario with_absolute_paths(Scenario);

/// The whole scenario as YAML: every key with its value, unit and meaning. Loads back to the identical Scenario.
std::string resolved_yaml(const Scenario&);
/// The same as one document of schema hotbunk.scenario/1; its `scenario` loads as a file.
std::string resolved_json(const Scenario&);

/// The table of keys for docs/scenario.md, in Markdown.
std::string scenario_reference();

}  // namespace hotbunk
