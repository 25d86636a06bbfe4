#include "spec/config_reader.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "spec/json_read.h"

namespace hotbunk {

using nlohmann::json;
using std::int64_t;

void ConfigReader::report(const char* code, std::string_view key, std::string message, std::vector<std::string> notes,
                          std::string help) {
  problems_.push_back({.code = code,
                       .message = std::move(message),
                       .where = locate_(key),
                       .notes = std::move(notes),
                       .help = std::move(help)});
}

const json* ConfigReader::find(std::string_view key) const {
  const auto at = json_.find(std::string(key));
  return at == json_.end() || at->is_null() ? nullptr : &*at;
}

bool ConfigReader::names(std::string_view key) const { return json_.contains(std::string(key)); }

int64_t ConfigReader::integer(std::string_view key, std::optional<int64_t> fallback, int64_t low, int64_t high) {
  const json* value = find(key);
  if (value == nullptr) {
    if (!fallback) report("E410", key, fmt::format("config key \"{}\" is missing", key));
    return fallback.value_or(low);
  }
  const bool whole = value->is_number_integer() &&
                     !(value->is_number_unsigned() &&
                       value->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!whole || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    report("E411", key,
           fmt::format("config key \"{}\" is {}, expected an integer from {} to {}", key, describe_json(*value), low,
                       high));
    return low;
  }
  return value->get<int64_t>();
}

double ConfigReader::real(std::string_view key, double fallback, double low, double high) {
  const json* value = find(key);
  return value == nullptr ? fallback : checked_real(*value, key, fallback, low, high);
}

double ConfigReader::checked_real(const json& value, std::string_view key, double fallback, double low, double high) {
  if (value.is_number()) {
    const double x = value.get<double>();
    if (x >= low && x <= high) return x;
  }
  report("E411", key,
         fmt::format("config key \"{}\" is {}, expected a number from {} to {}", key, describe_json(value), low, high));
  return fallback;
}

bool ConfigReader::boolean(std::string_view key, bool fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  report("E411", key, fmt::format("config key \"{}\" is {}, expected true or false", key, describe_json(*value)));
  return fallback;
}

std::string ConfigReader::text(std::string_view key, const std::string& fallback) {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) return value->get<std::string>();
  report("E411", key, fmt::format("config key \"{}\" is {}, expected a string", key, describe_json(*value)));
  return fallback;
}

int64_t ConfigReader::token(std::string_view key, int64_t vocab) {
  const json* value = find(key);
  if (value == nullptr) return -1;
  const json listed = value->is_array() && !value->empty() ? *value : json::array({*value});
  for (const json& id : listed) {
    if (!id.is_number_integer() || id.get<int64_t>() < -1 || id.get<int64_t>() > max_vocab) {
      report("E411", key,
             fmt::format("config key \"{}\" is {}, expected a token id or a list of them", key,
                         describe_json(value->is_array() ? id : *value)));
      return -1;
    }
    if (id.get<int64_t>() >= vocab && ok())
      report("E413", key, fmt::format("{} {} lies outside the vocabulary of {}", key, id.get<int64_t>(), vocab));
  }
  return listed.front().get<int64_t>();
}

std::optional<std::vector<bool>> ConfigReader::layer_types(int64_t layers, std::string_view one,
                                                           std::string_view other) {
  const json* const list = find("layer_types");
  if (list == nullptr) return std::nullopt;
  std::vector<bool> types;
  for (const json& type : list->is_array() ? *list : json::array()) {
    const std::string said = type.is_string() ? type.get<std::string>() : "";
    if (said != one && said != other) break;
    types.push_back(said == one);
  }
  if (list->is_array() && std::ssize(types) == layers && types.size() == list->size()) return types;
  report("E411", "layer_types",
         fmt::format("config key \"layer_types\" does not give each of {} layers \"full_attention\" or \"{}\"", layers,
                     one == "full_attention" ? other : one));
  return types;
}

}  // namespace hotbunk
