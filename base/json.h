// JSON as text, both ways. A unit that calls the library's own parse or dump compiles a parser or a printer of its own,
// 1.5 s and 1 s; these are compiled once. What comes from outside is read by spec/json_read.h.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace hotbunk {

// Json: nlohmann::json or nlohmann::ordered_json.

/// The document in a text. Throws nlohmann's parse_error where it is none.
template <class Json>
Json json_from(std::string_view text);
bool is_json(std::string_view text);
/// As json_from, but for a text that is no JSON a value that is_discarded().
template <class Json>
Json json_or_discarded(std::string_view text);

/// What becomes of strings that are not UTF-8, as JSON must be.
enum class NotUtf8 { throws, replaced };  // nlohmann's type_error; by U+FFFD
/// On one line, or with lines indented by so many spaces.
template <class Json>
std::string json_text(const Json&, int indent = -1, NotUtf8 = NotUtf8::throws);

}  // namespace hotbunk
