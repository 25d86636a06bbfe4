// A scenario → the launch arguments of another system: the tables and rules of import, backwards.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "interop/key_table.h"
#include "spec/scenario.h"

namespace hotbunk {

struct ExportedLaunch {
  std::string command;
  std::vector<std::pair<std::string, std::string>> arguments;  // key, value; in the order of the table
  std::vector<std::string> unsaid;                             // what of the scenario the system has no key for
  std::string text;                                            // the command with its arguments, as a shell reads it
};

/// What a launch of the system cannot be, whatever its keys: E156. Megatron-LM has no rollout, slime and Megatron-LM
/// have no adapters, and Megatron-Bridge's are of modules that it has for a model's matrices. nullopt: there is nothing
/// such.
std::optional<Diagnostic> why_not_exported(const LaunchTable&, const Scenario&);

/// import_launch of it gives the same value of every key in exported_keys, but for what `unsaid` names.
ExportedLaunch export_launch(const LaunchTable&, const Scenario&);

/// The scenario keys that the system has keys for: targets of its table, and what rules write from its roles.
std::set<std::string> exported_keys(const LaunchTable&);

}  // namespace hotbunk
