#include "interop/key_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/file.h"
#include "interop/rules.h"
#include "interop/settings.h"
#include "spec/catalog.h"
#include "spec/scenario_keys.h"
#include "spec/yaml_tree.h"

namespace hotbunk {
namespace {

constexpr std::int64_t most_table_bytes = 4 << 20;

bool matches(const std::string& pattern, const std::string& key) {
  if (!pattern.ends_with('*')) return pattern == key;
  return key.starts_with(std::string_view(pattern).substr(0, pattern.size() - 1));
}

class TableReader {
 public:
  explicit TableReader(std::string file) : file_(std::move(file)) {}

  Result<LaunchTable> read(const YamlNode& root) {
    for (const YamlEntry& entry : root.entries) {
      const YamlNode& value = entry.value;
      if (entry.key == "schema") continue;
      if (entry.key == "system") table_.system = value.text;
      else if (entry.key == "title") table_.title = value.text;
      else if (entry.key == "release") table_.release = value.text;
      else if (entry.key == "form") table_.form = value.text == "flags" ? LaunchForm::flags : LaunchForm::hydra;
      else if (entry.key == "entries") table_.entries = texts(value);
      else if (entry.key == "command") table_.command = value.text;
      else if (entry.key == "scenario") table_.scenario = words(value);
      else if (entry.key == "writes") table_.writes = words(value);
      else if (entry.key == "keys") keys(value);
      else refuse("E202", fmt::format("unknown key {} of a table of launches", entry.key), entry.where);
    }
    if (!problems_.empty()) return fail(std::move(problems_));
    return std::move(table_);
  }

 private:
  void refuse(const char* code, std::string message, SourceLocation where) {
    problems_.push_back(
        {.code = code, .message = std::move(message), .where = std::move(where), .notes = {}, .help = {}});
  }

  static std::vector<std::string> texts(const YamlNode& node) {
    std::vector<std::string> out;
    if (node.kind == YamlNode::Kind::scalar) out.push_back(plain_value(node.text));
    for (const YamlNode& item : node.items) out.push_back(plain_value(item.text));
    return out;
  }
  static WordPairs words(const YamlNode& node) {
    WordPairs out;
    for (const YamlEntry& entry : node.entries)
      out.emplace_back(plain_value(entry.key), entry.value.kind == YamlNode::Kind::null ? "null" : entry.value.text);
    return out;
  }

  void keys(const YamlNode& node) {
    for (const YamlEntry& entry : node.entries) {
      LaunchKey& key = table_.keys.emplace_back();
      key.key = entry.key;
      key.line = entry.where.line;
      if (entry.value.kind == YamlNode::Kind::scalar) key.ignored = entry.value.text;
      for (const YamlEntry& field : entry.value.entries) set(key, field);
      if (key.to.empty() && key.role.empty() && key.ignored.empty())
        refuse("E208", fmt::format("{} becomes nothing and says not why", key.key), entry.where);
    }
  }

  void set(LaunchKey& key, const YamlEntry& field) {
    const YamlNode& value = field.value;
    if (field.key == "default")
      key.default_value = value.kind == YamlNode::Kind::sequence ? "" : plain_value(value.text);
    else if (field.key == "to") targets(key, value);
    else if (field.key == "role") key.role = value.text;
    else if (field.key == "words") key.words = words(value);
    else if (field.key == "ignored") key.ignored = value.text;
    else if (field.key == "factor") factor(key, value);
    else if (field.key == "also") also(key, value);
    else if (field.key == "when" && value.entries.size() == 1) {
      key.when_key = value.entries[0].key;
      key.when_values = texts(value.entries[0].value);
    } else {
      refuse("E202", fmt::format("unknown field {} of {}", field.key, key.key), field.where);
    }
    if (field.key == "role" && !is_launch_role(key.role))
      refuse("E207", fmt::format("{} has the role {}, which no rule knows", key.key, key.role), field.where);
  }

  void factor(LaunchKey& key, const YamlNode& value) {
    key.factor = number_of(value.text).value_or(0);
    if (key.factor <= 0) refuse("E205", fmt::format("the factor of {} is no number", key.key), value.where);
  }

  void also(LaunchKey& key, const YamlNode& value) {
    for (const std::string& name : texts(value)) key.also.emplace_back(name, WordPairs{});
    for (const YamlEntry& entry : value.entries) key.also.emplace_back(entry.key, words(entry.value));
  }

  void targets(LaunchKey& key, const YamlNode& value) {
    for (const std::string& name : texts(value)) key.to.push_back({name, {}});
    for (const YamlEntry& entry : value.entries) key.to.push_back({entry.key, words(entry.value)});
    for (const KeyTarget& target : key.to)
      if (find_scenario_key(target.scenario_key) == nullptr)
        refuse("E202", fmt::format("{} becomes {}, which is no key of a scenario", key.key, target.scenario_key),
               value.where);
  }

  std::string file_;
  LaunchTable table_;
  Diagnostics problems_;
};

}  // namespace

const LaunchKey* LaunchTable::find(const std::string& key) const {
  for (const LaunchKey& row : keys) {
    if (matches(row.key, key)) return &row;
    for (const auto& [name, words] : row.also)
      if (name == key) return &row;
  }
  return nullptr;
}

std::vector<std::string> launch_systems() { return catalog_names("launches"); }

Result<LaunchTable> read_launch_table(const std::string& system) {
  const auto file = catalog_file("launches", system);
  if (file.empty())
    return fail(Diagnostic{.code = "E151",
                           .message = fmt::format("no table of the launches of '{}'", system),
                           .where = {},
                           .notes = {fmt::format("there are {}", fmt::join(launch_systems(), ", "))},
                           .help = {}});
  const auto text = read_file(file, most_table_bytes);
  const auto tree = text ? parse_yaml(*text, file.string()) : fail(text.error());
  if (!tree) return fail(tree.error());
  return TableReader(file.string()).read(*tree);
}

}  // namespace hotbunk
