// What tests do with JSON, without a parser and a printer in each of their units: base/json.h, also when a CHECK that
// fails shows a value.
#pragma once
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "base/json.h"

namespace Catch {

template <>
struct StringMaker<nlohmann::json> {
  static std::string convert(const nlohmann::json& json) { return hotbunk::json_text(json); }
};
template <>
struct StringMaker<nlohmann::ordered_json> {
  static std::string convert(const nlohmann::ordered_json& json) { return hotbunk::json_text(json); }
};

}  // namespace Catch
