#include "spec/model_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "spec/catalog.h"
#include "spec/json_read.h"
#include "spec/model_config.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

Diagnostic model_problem(const char* code, std::string message, SourceLocation where,
                         std::vector<std::string> notes = {}, std::string help = {}) {
  return {.code = code,
          .message = std::move(message),
          .where = std::move(where),
          .notes = std::move(notes),
          .help = std::move(help)};
}

template <class T>
bool parse_number(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && at == end;
}

json scalar_to_json(const YamlNode& node) {
  if (node.quoted) return node.text;
  if (node.text == "true" || node.text == "True") return true;
  if (node.text == "false" || node.text == "False") return false;
  std::uint64_t whole = 0;
  std::int64_t negative = 0;
  double real = 0;
  if (parse_number(node.text, whole)) return whole;
  if (parse_number(node.text, negative)) return negative;
  if (parse_number(node.text, real) && std::isfinite(real)) return real;
  return node.text;
}

json to_json(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::null:
      return nullptr;
    case YamlNode::Kind::scalar:
      return scalar_to_json(node);
    case YamlNode::Kind::sequence: {
      json list = json::array();
      for (const auto& item : node.items) list.push_back(to_json(item));
      return list;
    }
    case YamlNode::Kind::map: {
      json map = json::object();
      for (const auto& entry : node.entries) map[entry.key] = to_json(entry.value);
      return map;
    }
  }
  return nullptr;
}

/// "owner/model".
bool is_hub_name(const std::string& text) {
  const std::size_t slash = text.find('/');
  return slash != 0 && slash + 1 < text.size() && slash == text.rfind('/') && text[0] != '.' && text[0] != '~' &&
         !text.ends_with(".json");
}

/// The config.json behind a catalogue name, a path or a name of the hub, or E209.
Result<fs::path> config_file(const YamlNode& node, const fs::path& folder) {
  if (const fs::path entry = catalog_file("models", node.text); !entry.empty()) return entry;
  const fs::path path = resolve_path(node.text, folder);
  std::error_code ec;
  if (fs::exists(path, ec)) return path;
  if (const std::string entry = catalog_model_of_hub(node.text); !entry.empty()) return catalog_file("models", entry);
  const auto names = catalog_names("models");
  const std::string nearest = nearest_name(node.text, names);
  return fail(model_problem(
      "E209", fmt::format("no model '{}': neither a catalogue name nor a path that exists", node.text), node.where,
      {fmt::format("catalogue: {}", fmt::join(names, ", "))},
      !nearest.empty() ? fmt::format("did you mean {}?", nearest)
      : is_hub_name(node.text)
          ? fmt::format("fetch https://huggingface.co/{}/raw/main/config.json and name that file", node.text)
          : "give a catalogue name, a config.json or a model folder"));
}

/// A map: optional `base` and `weights` and `name`, the rest are config.json keys that replace the base's.
class InlineModel {
 public:
  InlineModel(const YamlNode& node, const fs::path& folder) : node_(node), folder_(folder) {}

  Result<ModelSpec> read() {
    check_keys();
    json config = json::object();
    std::string name = "custom", base_file;
    std::string base_text;
    if (const YamlNode* base = node_.find("base"); base != nullptr && text_of(*base, "base")) {
      auto file = config_file(*base, folder_);
      if (!file) return give_up(file.error());
      std::error_code ec;
      base_file = (fs::is_directory(*file, ec) ? *file / "config.json" : *file).string();
      auto text = read_file(base_file, std::int64_t{16} << 20);
      if (!text) return give_up(text.error());
      auto parsed = parse_json(*text, base_file);
      if (!parsed) return give_up(parsed.error());
      if (parsed->is_object()) config = std::move(*parsed);
      base_text = std::move(*text);
      name = base->text + "-changed";
    }
    for (const auto& entry : node_.entries) {
      if (entry.key == "base" || entry.key == "weights" || entry.key == "name") continue;
      // A new theta or scaling must not be hidden behind the base's rope_parameters.
      if (entry.key == "rope_theta" || entry.key == "rope_scaling") config.erase("rope_parameters");
      config[entry.key] = to_json(entry.value);
    }
    if (const YamlNode* given = node_.find("name"); given != nullptr && text_of(*given, "name")) name = given->text;
    auto model = model_from_json(config, name, [&](std::string_view key) {
      for (const auto& entry : node_.entries)
        if (entry.key == key) return entry.where;
      return base_file.empty() ? node_.where : locate_json_key(base_text, base_file, key);
    });
    if (!model) return give_up(model.error());
    if (const YamlNode* weights = node_.find("weights"); weights != nullptr && weights->kind != YamlNode::Kind::null &&
                                                         text_of(*weights, "weights") && !weights->text.empty())
      model->weights_path = resolve_path(weights->text, folder_).string();
    if (!problems_.empty()) return fail(std::move(problems_));
    return model;
  }

 private:
  Result<ModelSpec> give_up(const Diagnostics& more) {
    problems_.insert(problems_.end(), more.begin(), more.end());
    return fail(std::move(problems_));
  }

  bool text_of(const YamlNode& value, const char* key) {
    if (value.kind == YamlNode::Kind::scalar) return true;
    problems_.push_back(
        model_problem("E205", fmt::format("model.{} is {}, expected text", key, value.describe()), value.where));
    return false;
  }

  void check_keys() {
    std::vector<std::string> known = config_keys();
    known.insert(known.end(), {"base", "weights", "name"});
    for (const auto& entry : node_.entries) {
      if (std::find(known.begin(), known.end(), entry.key) != known.end()) continue;
      const std::string nearest = nearest_name(entry.key, known);
      problems_.push_back(model_problem("E202", fmt::format("unknown key model.{}", entry.key), entry.where,
                                        {"a model map takes the keys of config.json, and base, weights, name"},
                                        nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
    }
  }

  const YamlNode& node_;
  const fs::path& folder_;
  Diagnostics problems_;
};

}  // namespace

fs::path resolve_path(const std::string& path, const fs::path& folder) {
  std::error_code ec;
  const fs::path below = folder / path;  // an absolute path stays itself
  return fs::exists(below, ec) ? below.lexically_normal() : fs::path(path).lexically_normal();
}

Result<ModelSpec> read_model(const YamlNode& node, const fs::path& folder) {
  if (node.kind == YamlNode::Kind::map) return InlineModel(node, folder).read();
  if (node.kind != YamlNode::Kind::scalar || node.text.empty())
    return fail(model_problem(
        "E205",
        fmt::format("model is {}, expected a catalogue name, a path, or a map of config.json keys", node.describe()),
        node.where));
  auto file = config_file(node, folder);
  if (!file) return fail(file.error());
  auto model = load_model(*file);
  std::error_code ec;
  if (model && catalog_file("models", node.text).empty() && !fs::exists(resolve_path(node.text, folder), ec))
    model->hub_name = node.text;
  return model;
}

}  // namespace hotbunk
