// Small launches for tests: a file of a test's own, and words of a command line.
#pragma once
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "interop/import.h"
#include "interop/shell_script.h"
#include "spec/scenario_keys.h"

namespace hotbunk {

/// A file in a folder of this process.
inline std::string launch_file(const std::string& name, const std::string& text) {
  const auto folder = std::filesystem::temp_directory_path() / ("hotbunk_interop_" + std::to_string(::getpid()));
  const auto path = folder / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
  return path.string();
}

inline LaunchTable table_of(const std::string& system) {
  auto table = read_launch_table(system);
  if (!table) FAIL(render(table.error()));
  return std::move(*table);
}

/// The words of one command, as bash splits them.
inline std::vector<std::string> words_of(const std::string& command) {
  const auto script = parse_shell_script(command, "words", {});
  if (!script) FAIL(render(script.error()));
  REQUIRE(script->commands.size() == 1);
  std::vector<std::string> out;
  for (const ShellWord& word : script->commands[0]) out.push_back(word.text);
  return out;
}

inline Result<ImportedScenario> imported(const std::string& system, const LaunchSource& source,
                                         const std::vector<std::string>& sets = {}) {
  return import_launch(table_of(system), source, sets);
}

/// Of a launch that must be read.
inline ImportedScenario import_of(const std::string& system, const LaunchSource& source,
                                  const std::vector<std::string>& sets = {}) {
  auto out = imported(system, source, sets);
  if (!out) FAIL(render(out.error()));
  return std::move(*out);
}

inline std::string value_of(const Scenario& s, const std::string& key) {
  const ScenarioKey* const known = find_scenario_key(key);
  REQUIRE(known != nullptr);
  return yaml_of(known->get(s));
}

inline const ImportedKey* key_of(const ImportedScenario& imported, const std::string& key) {
  for (const ImportedKey& k : imported.keys)
    if (k.key == key) return &k;
  return nullptr;
}

}  // namespace hotbunk
