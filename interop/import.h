// A launch of another system → a scenario file, with what became of every key.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/diagnostic.h"
#include "interop/key_table.h"
#include "interop/rules.h"
#include "interop/settings.h"

namespace hotbunk {

/// Where a launch stands: a file (a script, a YAML, a TOML; by its extension), words of a command line, or both, the
/// words over the file.
struct LaunchSource {
  std::string file;                              // "" = none
  std::vector<std::string> words;                // as the shell expanded them
  std::map<std::string, std::string> variables;  // that the script does not set: NAME → value
};

/// What a launch sets, before anything is made of it.
struct LaunchSettings {
  Settings settings;
  std::vector<std::string> notes;  // of the script: what was taken for granted
  std::string expandable;          // what asks PyTorch's allocator for expandable segments, "" = nothing
};
/// E101, E102, E150 (no launch of this system in the script), E155, E201.
Result<LaunchSettings> read_launch(const LaunchTable&, const LaunchSource&);

enum class KeyFate : std::uint8_t { taken, defaulted, ignored, unknown };
std::string_view name_of(KeyFate);

/// What became of one key of the other system.
struct ImportedKey {
  std::string key, value;
  SourceLocation where;
  KeyFate fate = KeyFate::taken;
  std::string to;   // the scenario keys, or the rule that it is for
  std::string why;  // of what is ignored
};

struct ImportedScenario {
  std::string system, release, name;
  std::vector<ScenarioLine> lines;  // "model" first, then in the order of the scenario's keys
  std::vector<ImportedKey> keys;    // given ones as they were given, then defaults
  std::vector<std::string> notes, undefined;
  std::string expandable;  // of the launch, what no scenario key says; "" = nothing asks for expandable segments
  std::string text;        // the scenario file, commented
  Scenario scenario;
};

/// `sets` are --set texts over what the launch says. E151 (keys that contradict each other), E152 (a value that cannot
/// be read), E153 (no model), and what the scenario's rules say of the result, at the launch's line where it has one.
Result<ImportedScenario> import_launch(const LaunchTable&, const LaunchSource&,
                                       const std::vector<std::string>& sets = {});

/// The same of settings that are read.
Result<ImportedScenario> import_settings(const LaunchTable&, const LaunchSettings&, const std::string& name,
                                         const std::string& folder, const std::vector<std::string>& sets = {});

}  // namespace hotbunk
