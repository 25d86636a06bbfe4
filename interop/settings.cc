#include "interop/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/file.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t most_config_bytes = 4 << 20;
constexpr int most_defaults = 16;

void put(Settings& all, Setting setting) {
  std::erase_if(all, [&](const Setting& s) { return s.key == setting.key; });
  all.push_back(std::move(setting));
}

std::string flow_text(const YamlNode& node) {
  if (node.kind == YamlNode::Kind::sequence) {
    std::vector<std::string> items;
    for (const YamlNode& item : node.items) items.push_back(flow_text(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  if (node.kind == YamlNode::Kind::map) {
    std::vector<std::string> items;
    for (const YamlEntry& entry : node.entries) items.push_back(entry.key + ": " + flow_text(entry.value));
    return fmt::format("{{{}}}", fmt::join(items, ", "));
  }
  return node.kind == YamlNode::Kind::null ? "null" : node.text;
}

void flatten(const YamlNode& node, const std::string& path, Settings& out) {
  if (node.kind == YamlNode::Kind::map && !(node.entries.empty() && !path.empty())) {
    for (const YamlEntry& entry : node.entries)
      flatten(entry.value, path.empty() ? entry.key : path + "." + entry.key, out);
    return;
  }
  out.push_back({path, plain_value(flow_text(node)), node.where, {}, false});
}

Result<Settings> yaml_over_defaults(const fs::path& path, int depth) {
  if (depth > most_defaults)
    return fail(Diagnostic{.code = "E155",
                           .message = "the files of `defaults` name each other",
                           .where = {path.string()},
                           .notes = {fmt::format("{} of them, one behind the other", most_defaults)},
                           .help = "give the resolved configuration"});
  const auto text = read_file(path, most_config_bytes);
  auto tree = text ? parse_yaml(*text, path.string()) : fail(text.error());
  if (!tree) return fail(tree.error());
  Settings all;
  if (const YamlNode* const defaults = tree->find("defaults")) {
    std::vector<YamlNode> files = defaults->items;
    if (defaults->kind == YamlNode::Kind::scalar) files.push_back(*defaults);
    for (const YamlNode& file : files) {
      if (file.kind != YamlNode::Kind::scalar || !(file.text.ends_with(".yaml") || file.text.ends_with(".yml")))
        continue;
      auto base = yaml_over_defaults(path.parent_path() / file.text, depth + 1);
      if (!base) return fail(base.error());
      override_settings(all, *base);
    }
  }
  std::erase_if(tree->entries, [](const YamlEntry& entry) { return entry.key == "defaults"; });
  Settings own;
  flatten(*tree, "", own);
  override_settings(all, own);
  return all;
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

/// Resolves one setting's value; what it refers to first.
class Interpolation {
 public:
  explicit Interpolation(const Settings& all) : all_(all) {}

  std::string resolved(const std::string& value, const std::string& key, std::vector<std::string>& undefined,
                       int depth) {
    std::string out;
    for (std::size_t at = 0; at < value.size();) {
      if (value.compare(at, 2, "${") != 0) {
        out += value[at++];
        continue;
      }
      const std::size_t end = closing(value, at + 1);
      if (end == std::string::npos) return out + value.substr(at);
      const std::string whole = value.substr(at, end - at);
      const auto inner = depth > 32 ? std::nullopt : one(whole.substr(2, whole.size() - 3), key, undefined, depth);
      if (!inner && std::ranges::find(undefined, whole) == undefined.end()) undefined.push_back(whole);
      out += inner.value_or(whole);
      at = end;
    }
    return out;
  }

 private:
  static std::size_t closing(const std::string& text, std::size_t at) {
    int depth = 0;
    for (; at < text.size(); ++at) {
      if (text[at] == '{') ++depth;
      if (text[at] == '}' && --depth == 0) return at + 1;
    }
    return std::string::npos;
  }

  static std::vector<std::string> arguments(const std::string& text) {
    std::vector<std::string> out(1);
    int depth = 0;
    for (const char c : text) {
      if (c == '{') ++depth;
      if (c == '}') --depth;
      if (c == ',' && depth == 0) out.emplace_back();
      else out.back() += c;
    }
    for (std::string& argument : out) argument = trimmed(argument);
    return out;
  }

  const Setting* find(const std::string& key) const {
    const auto at = std::ranges::find(all_, key, &Setting::key);
    return at == all_.end() ? nullptr : &*at;
  }

  std::optional<std::string> value_of(const std::string& key, std::vector<std::string>& undefined, int depth) {
    const Setting* const found = find(key);
    if (found == nullptr) return std::nullopt;
    undefined.insert(undefined.end(), found->undefined.begin(), found->undefined.end());
    return resolved(found->value, key, undefined, depth + 1);
  }

  /// "a.b", ".b", "oc.select:a.b,0", "mul:${a},2"
  std::optional<std::string> one(const std::string& text, const std::string& key, std::vector<std::string>& undefined,
                                 int depth) {
    const auto colon = text.find(':');
    if (colon == std::string::npos) return value_of(absolute(text, key), undefined, depth);
    const std::string function = text.substr(0, colon);
    std::vector<std::string> given = arguments(text.substr(colon + 1));
    if (function == "oc.select" || function == "oc.env") {
      if (function == "oc.select")
        if (auto found = value_of(given[0], undefined, depth)) return found;
      if (given.size() < 2) return std::nullopt;
      return plain_value(resolved(given[1], key, undefined, depth + 1));
    }
    std::vector<double> numbers;
    for (const std::string& argument : given) {
      const auto value = number_of(resolved(argument, key, undefined, depth + 1));
      if (!value) return std::nullopt;
      numbers.push_back(*value);
    }
    if (numbers.empty()) return std::nullopt;
    double out = numbers[0];
    for (std::size_t i = 1; i < numbers.size(); ++i) {
      const double x = numbers[i];
      if (function == "mul") out *= x;
      else if (function == "add") out += x;
      else if (function == "sub") out -= x;
      else if (function == "div") out = std::floor(out / x);
      else if (function == "max") out = std::max(out, x);
      else if (function == "min") out = std::min(out, x);
      else return std::nullopt;
    }
    return std::isfinite(out) ? std::optional(fmt::format("{}", out)) : std::nullopt;
  }

  /// ".b" of "x.y.a" is "x.y.b", "..b" is "x.b".
  static std::string absolute(const std::string& name, std::string key) {
    if (!name.starts_with('.')) return name;
    std::size_t dots = 0;
    while (dots < name.size() && name[dots] == '.') {
      ++dots;
      const auto last = key.rfind('.');
      key = last == std::string::npos ? "" : key.substr(0, last);
    }
    return key.empty() ? name.substr(dots) : key + "." + name.substr(dots);
  }

  const Settings& all_;
};

bool is_flag(const std::string& word) { return word.size() > 2 && word.starts_with("--"); }

}  // namespace

bool is_unset_array(const ShellWord& word) {
  return !word.undefined.empty() && word.text.starts_with("${") &&
         (word.text.ends_with("[@]}") || word.text.ends_with("[*]}"));
}

std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && stop == text.data() + text.size() && std::isfinite(value);
  return whole ? std::optional(value) : std::nullopt;
}

std::string plain_value(std::string text) {
  text = trimmed(text);
  if (text.size() >= 2 && (text.front() == '"' || text.front() == '\'') && text.back() == text.front())
    return text.substr(1, text.size() - 2);
  if (text == "True" || text == "TRUE") return "true";
  if (text == "False" || text == "FALSE") return "false";
  if (text == "None" || text == "Null" || text == "NULL" || text == "~" || text.empty()) return "null";
  return text;
}

Settings hydra_settings(const ShellCommand& words) {
  Settings out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i].text;
    std::string key = word.substr(0, word.find('='));
    const bool config = key == "--config-name" || key == "--config-path" || key == "-cn";
    if (word.find('=') == std::string::npos) {
      if (config && i + 1 < words.size())
        put(out, {"--config-name", plain_value(words[i + 1].text), words[i].where, {}, false});
      continue;
    }
    if (!config) key.erase(0, std::min(key.find_first_not_of('+'), key.size()));
    const bool name = !key.empty() && key.find_first_of(" $/-") == std::string::npos;
    if (!name && !config) continue;
    Setting setting{key, plain_value(word.substr(word.find('=') + 1)), words[i].where, words[i].undefined, false};
    override_settings(out, {setting});
  }
  return out;
}

Settings flag_settings(const ShellCommand& words) {
  Settings out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (!is_flag(words[i].text)) continue;
    Setting setting{words[i].text.substr(2), "", words[i].where, words[i].undefined, false};
    if (const auto equals = setting.key.find('='); equals != std::string::npos) {
      setting.value = plain_value(setting.key.substr(equals + 1));
      setting.key.resize(equals);
      put(out, std::move(setting));
      continue;
    }
    std::vector<std::string> values;
    while (i + 1 < words.size() && !is_flag(words[i + 1].text)) {
      ++i;
      if (is_unset_array(words[i])) continue;
      values.push_back(plain_value(words[i].text));
      setting.undefined.insert(setting.undefined.end(), words[i].undefined.begin(), words[i].undefined.end());
    }
    setting.bare = values.empty();
    setting.value = values.empty()       ? "true"
                    : values.size() == 1 ? values[0]
                                         : fmt::format("[{}]", fmt::join(values, ", "));
    put(out, std::move(setting));
  }
  return out;
}

void override_settings(Settings& base, const Settings& more) {
  for (const Setting& setting : more) {
    std::erase_if(base, [&](const Setting& s) {
      return s.key == setting.key || s.key.starts_with(setting.key + ".") || setting.key.starts_with(s.key + ".");
    });
    base.push_back(setting);
  }
}

Result<Settings> yaml_settings(const fs::path& path) { return yaml_over_defaults(path, 0); }

Result<Settings> toml_settings(const fs::path& path) {
  const auto text = read_file(path, most_config_bytes);
  if (!text) return fail(text.error());
  Settings out;
  std::string section;
  int line_number = 0;
  const auto problem = [&](std::string message) {
    return fail(Diagnostic{.code = "E201",
                           .message = std::move(message),
                           .where = {path.string(), line_number, 1},
                           .notes = {"read are [section] and key = value with a number, a text, true, false or a list"},
                           .help = {}});
  };
  for (std::size_t at = 0; at < text->size();) {
    const std::size_t end = std::min(text->find('\n', at), text->size());
    std::string line = trimmed(text->substr(at, end - at));
    at = end + 1;
    ++line_number;
    const SourceLocation where{path.string(), line_number, 1};
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[' && line.find('=') == std::string::npos) {
      const auto close = line.find(']');
      if (close == std::string::npos || line.starts_with("[[")) return problem("a section's name does not close");
      section = trimmed(line.substr(1, close - 1));
      continue;
    }
    const auto equals = line.find('=');
    if (equals == std::string::npos) return problem("neither a section nor key = value");
    const int first = line_number;
    std::string value = line.substr(equals + 1);
    while (std::ranges::count(value, '[') > std::ranges::count(value, ']') && at < text->size()) {  // a list over lines
      const std::size_t next = std::min(text->find('\n', at), text->size());
      value += "\n" + text->substr(at, next - at);
      at = next + 1;
      ++line_number;
    }
    const auto tree = parse_yaml("value: " + trimmed(value), path.string());  // its scalars and lists are YAML's
    const YamlNode* const node = tree ? tree->find("value") : nullptr;
    if (node == nullptr || value.find("\"\"\"") != std::string::npos) {
      line_number = first;
      return problem("a value of another kind");
    }
    std::string key = plain_value(line.substr(0, equals));
    if (!section.empty()) key.insert(0, section + ".");
    put(out, {std::move(key), plain_value(flow_text(*node)), where, {}, false});
  }
  return out;
}

void resolve_interpolations(Settings& settings) {
  Interpolation interpolation(settings);
  Settings out = settings;
  for (Setting& setting : out) setting.value = interpolation.resolved(setting.value, setting.key, setting.undefined, 0);
  settings = std::move(out);
}

}  // namespace hotbunk
