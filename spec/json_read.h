// JSON from outside: bounded in depth, no duplicate keys, every error with line and column. No exception leaves here.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

struct JsonLimits {
  int max_depth = 64;
  std::int64_t max_values = 4'000'000;  // scalars, arrays and objects together
};

/// The document, or E104 (syntax, depth, duplicate key) at its line and column. `code` replaces E104 where a caller has
/// a more specific one. `with_position` = false leaves positions out (binary files).
Result<nlohmann::json> parse_json(std::string_view text, const std::string& file, const JsonLimits& limits = {},
                                  const char* code = "E104", bool with_position = true);

/// Where `"key":` first stands in the text; only the file when it does not.
SourceLocation locate_json_key(std::string_view text, const std::string& file, std::string_view key);

/// "an object", "a string \"abc\"", "the number 3.5": for messages that say what was found.
std::string describe_json(const nlohmann::json&);

}  // namespace hotbunk
