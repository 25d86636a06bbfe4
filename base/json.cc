#include "base/json.h"

#include <nlohmann/json.hpp>

namespace hotbunk {

template <class Json>
Json json_from(std::string_view text) {
  return Json::parse(text);
}

template <class Json>
Json json_or_discarded(std::string_view text) {
  return Json::parse(text, nullptr, false);
}

template <class Json>
std::string json_text(const Json& json, int indent, NotUtf8 bytes) {
  using Handler = typename Json::error_handler_t;
  return json.dump(indent, ' ', false, bytes == NotUtf8::replaced ? Handler::replace : Handler::strict);
}

bool is_json(std::string_view text) { return nlohmann::json::accept(text); }

template nlohmann::json json_from(std::string_view);
template nlohmann::ordered_json json_from(std::string_view);
template nlohmann::json json_or_discarded(std::string_view);
template nlohmann::ordered_json json_or_discarded(std::string_view);
template std::string json_text(const nlohmann::json&, int, NotUtf8);
template std::string json_text(const nlohmann::ordered_json&, int, NotUtf8);

}  // namespace hotbunk
