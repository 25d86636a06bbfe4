// The scenario as text: with every default filled in (`plan --resolved`), and the reference page of its keys.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/model_config.h"
#include "spec/names.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

std::string parent_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}
std::string leaf_of(const std::string& path) { return path.substr(path.rfind('.') + 1); }
std::string indent_of(const std::string& section) {
  return section.empty()
             ? ""
             : std::string(2 * (1 + static_cast<std::size_t>(std::count(section.begin(), section.end(), '.'))), ' ');
}

/// Prints the maps that lead from the section printed last to `section`.
void open_sections(std::string& out, std::string& current, const std::string& section) {
  if (section == current) return;
  std::string path;
  for (std::size_t from = 0; from < section.size();) {
    const auto dot = std::min(section.find('.', from), section.size());
    const std::string parent = path;
    path = section.substr(0, dot);
    from = dot + 1;
    if (current == path || current.starts_with(path + ".")) continue;
    const auto doc = scenario_section_doc(path);
    out += fmt::format("{}{}:{}{}\n", indent_of(parent), leaf_of(path), doc.empty() ? "" : "  # ", doc);
  }
  current = section;
}

std::string model_yaml(const ModelSpec& model) {
  std::string out = fmt::format("model:  # {} parameters\n  name: {}\n", parameter_count(model), yaml_text(model.name));
  if (!model.weights_path.empty()) out += fmt::format("  weights: {}\n", yaml_text(model.weights_path));
  nlohmann::json config = config_of(model, DType::f32);
  config.erase("dtype");  // of the checkpoint's files; train.precision and rollout.dtype decide here
  for (const auto& [key, value] : config.items()) out += fmt::format("  {}: {}\n", key, json_text(value));
  return out;
}

nlohmann::ordered_json slowdowns_json(const std::vector<Slowdown>& all) {
  auto out = nlohmann::ordered_json::array();
  for (const Slowdown& x : all) {
    nlohmann::ordered_json map = {{x.rank >= 0 ? "rank" : "node", x.rank >= 0 ? x.rank : x.node}};
    if (x.link != LinkKind::network) map["link"] = name_of(x.link);
    map["factor"] = x.factor;
    out.push_back(std::move(map));
  }
  return out;
}

bool is_printed(const ScenarioKey& key, const Scenario& scenario) {
  return key.in_resolved && !(key.only_when_set && key.get(scenario) == key.get(Scenario{}));
}

std::string comment_of(const ScenarioKey& key) {
  std::string text = key.unit.empty() ? key.doc : fmt::format("{}: {}", key.unit, key.doc);
  if (!key.choices.empty()) text = fmt::format("{} ({})", text, fmt::join(key.choices, " | "));
  return text;
}

std::string default_of(const ScenarioKey& key) {
  if (!key.derived.empty()) return key.derived;
  return fmt::format("`{}`", yaml_of(key.get(Scenario{})));
}

std::string range_of(const ScenarioKey& key) {
  if (!key.choices.empty()) return fmt::format("{}", fmt::join(key.choices, ", "));
  switch (key.type) {
    case KeyType::boolean:
      return key.may_be_count ? fmt::format("true, false, or integer {} … {}", key.low, key.high) : "true, false";
    case KeyType::text:
      return "text";
    case KeyType::steps:
      return "text, or list of words";
    case KeyType::integers:
      return "list of integers";
    case KeyType::slowdowns:
      return fmt::format("list of {{{}}}; factor {} … {}", fmt::join(key.fields, ", "), key.low, key.high);
    case KeyType::sourced:
      return fmt::format("{} … {}, or {{value, source}}", key.low, key.high);
    default:
      return fmt::format("{} {} … {}{}", key.type == KeyType::integer ? "integer" : "number", key.low, key.high,
                         key.may_be_auto ? ", or auto" : "");
  }
}

}  // namespace

Scenario with_absolute_paths(Scenario s) {
  const auto absolute = [](std::string& path) {
    std::error_code ec;
    if (!path.empty()) path = std::filesystem::absolute(path, ec).lexically_normal().string();
  };
  absolute(s.model.weights_path);
  absolute(s.task.data);
  absolute(s.model.lora.adapter);
  if (catalog_file("profiles", s.cluster.calibration).empty()) absolute(s.cluster.calibration);
  return s;
}

std::string resolved_yaml(const Scenario& scenario) {
  std::string out, current;
  bool model_printed = false;
  for (const auto& key : scenario_keys()) {
    if (!is_printed(key, scenario)) continue;
    const KeyValue value = key.get(scenario);
    if (std::holds_alternative<std::monostate>(value)) continue;
    if (!model_printed && !parent_of(key.path).empty()) {
      out += model_yaml(scenario.model);
      model_printed = true;
    }
    const std::string section = parent_of(key.path);
    open_sections(out, current, section);
    const std::string line = fmt::format("{}{}: {}", indent_of(section), leaf_of(key.path), yaml_of(value));
    out += fmt::format("{:<48}  # {}\n", line, comment_of(key));
  }
  return out;
}

std::string resolved_json(const Scenario& scenario) {
  nlohmann::ordered_json keys = {{"model", config_of(scenario.model, DType::f32)}};
  keys["model"].erase("dtype");
  keys["model"]["name"] = scenario.model.name;
  if (!scenario.model.weights_path.empty()) keys["model"]["weights"] = scenario.model.weights_path;
  for (const auto& key : scenario_keys()) {
    if (!is_printed(key, scenario)) continue;
    nlohmann::ordered_json value;
    std::visit(
        [&](const auto& v) {
          using V = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<V, Sourced>) value = {{"value", v.value}, {"source", v.source}};
          else if constexpr (std::is_same_v<V, std::vector<Slowdown>>) value = slowdowns_json(v);
          else if constexpr (!std::is_same_v<V, std::monostate>) value = v;
        },
        key.get(scenario));
    if (value.is_null()) continue;
    nlohmann::ordered_json* at = &keys;
    const std::string section = parent_of(key.path);
    for (std::size_t from = 0; from < section.size();) {
      const auto dot = std::min(section.find('.', from), section.size());
      at = &(*at)[section.substr(from, dot - from)];
      from = dot + 1;
    }
    (*at)[leaf_of(key.path)] = std::move(value);
  }
  return json_text(nlohmann::ordered_json{{"schema", "hotbunk.scenario/1"}, {"scenario", std::move(keys)}}, 1);
}

std::string scenario_reference() {
  std::string out, current = "-";
  for (const auto& key : scenario_keys()) {
    const std::string section = parent_of(key.path);
    if (section != current) {
      const auto doc = scenario_section_doc(section);
      out += fmt::format("\n### {}{}{}\n\n| key | takes | unit | default | meaning |\n|---|---|---|---|---|\n",
                         section.empty() ? "top level" : fmt::format("`{}`", section), doc.empty() ? "" : ": ", doc);
      current = section;
    }
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", leaf_of(key.path), range_of(key), key.unit, default_of(key),
                       key.doc);
  }
  return out;
}

}  // namespace hotbunk
