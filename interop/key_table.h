// The keys of another system: what each becomes of a scenario, its default and the release that the default is of. Data
// (scenarios/catalog/launches/*.yaml), which import and export both read.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Their word → ours, in order; the first that has our word is the one exported.
using WordPairs = std::vector<std::pair<std::string, std::string>>;

/// A scenario key that takes the value: as it is, by a word for it, or times a factor (MB → MiB).
struct KeyTarget {
  std::string scenario_key;
  WordPairs words;
};

struct LaunchKey {
  std::string key;
  std::vector<std::pair<std::string, WordPairs>> also;  // other spellings, older releases'
  std::optional<std::string> default_value;             // of that release; none: unset
  std::vector<KeyTarget> to;
  double factor = 1;     // ours = theirs x factor
  std::string role;      // what rules know it by (interop/rules.h); else `to`, else ignored
  WordPairs words;       // of the role's value
  std::string ignored;   // why; with a role, export writes it and import makes nothing of it
  std::string when_key;  // only read where this key has one of these values
  std::vector<std::string> when_values;
  int line = 0;  // of the table
};

enum class LaunchForm : std::uint8_t { hydra, flags };

struct LaunchTable {
  std::string system, title, release;
  LaunchForm form = LaunchForm::hydra;
  std::vector<std::string> entries;                           // words of the command that launches: main_ppo, train.py
  std::string command;                                        // that export writes before the arguments
  std::vector<std::pair<std::string, std::string>> scenario;  // keys that every launch of it has
  std::vector<std::pair<std::string, std::string>> writes;  // arguments that export writes beside what a scenario says
  std::vector<LaunchKey> keys;

  /// By its name, another spelling, or a pattern "a.b.*"; nullptr: none.
  const LaunchKey* find(const std::string& key) const;
};

/// Systems that have a table, sorted.
std::vector<std::string> launch_systems();

/// E101, E201, and E202, E205, E207 of a table that names scenario keys, roles or forms that are not there.
Result<LaunchTable> read_launch_table(const std::string& system);

}  // namespace hotbunk
