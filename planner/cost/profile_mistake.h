// What is wrong with a catalogue file of hardware or of a framework.
#pragma once
#include <string>
#include <utility>

#include "base/diagnostic.h"
#include "spec/yaml_tree.h"

namespace hotbunk {

/// E205 at the node.
inline Diagnostic profile_mistake(const YamlNode& node, std::string message, std::string help = "") {
  return {.code = "E205", .message = std::move(message), .where = node.where, .notes = {}, .help = std::move(help)};
}

}  // namespace hotbunk
