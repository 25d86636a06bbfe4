// The table of scenario keys. Parsing, `hotbunk plan --resolved` and docs/scenario.md all come from it, so that a key
// cannot be read, printed or documented differently in two places.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spec/scenario.h"

namespace hotbunk {

enum class KeyType : std::uint8_t { integer, real, boolean, text, choice, integers, sourced, steps, slowdowns };

/// A value in the unit of its key. monostate: the scenario has none (a precision the GPU lacks).
using KeyValue = std::variant<std::monostate, std::int64_t, double, bool, std::string, std::vector<std::int64_t>,
                              Sourced, std::vector<Slowdown>>;

struct ScenarioKey {
  std::string path;  // "train.layout.dp"
  KeyType type = KeyType::integer;
  std::string unit, doc;
  double low = 0, high = 0;           // of numbers, inclusive
  std::vector<std::string> choices;   // of a choice
  std::vector<std::string> fields{};  // of one map of slowdowns: rank, node, link, factor
  std::string derived;                // the default in words where it depends on other keys
  bool in_resolved = true;            // false: another spelling of a key that is printed
  bool only_when_set = false;         // not printed either at its default
  bool may_be_count = false;          // of a boolean: also an integer of the range
  bool may_be_auto = false;           // `auto`: what the other dimensions leave of the ranks
  std::function<KeyValue(const Scenario&)> get;
  std::function<void(Scenario&, const KeyValue&)> set;
};

/// In the order in which they are printed; keys of one section stand together.
const std::vector<ScenarioKey>& scenario_keys();
/// nullptr: no such key.
const ScenarioKey* find_scenario_key(std::string_view path);
/// "train" and "train.layout" are sections: maps that hold keys.
bool is_scenario_section(std::string_view path);
/// One line on a section.
std::string_view scenario_section_doc(std::string_view path);
/// Names that may stand directly under a section ("" = the top).
std::vector<std::string> names_under(const std::string& section);
/// The value as YAML ("4", "[8, 12]", "{value: 3350, source: \"datasheet\"}").
std::string yaml_of(const KeyValue&);
/// A YAML scalar, quoted where it must be.
std::string yaml_text(const std::string&);

}  // namespace hotbunk
