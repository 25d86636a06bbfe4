#include "graph/json_decode.h"

#include <fmt/format.h>

#include <limits>

#include "spec/json_read.h"

namespace hotbunk::decode {

using nlohmann::json;

std::string Value::path() const {
  if (!parent_) return "";
  const std::string before = parent_->path();
  if (key_.empty()) return fmt::format("{}[{}]", before, index_);
  return before.empty() ? std::string(key_) : fmt::format("{}.{}", before, key_);
}

void Value::wrong_type(std::string_view expected) const {
  const std::string at = path();
  throw Fault{{.code = codes_->wrong_type,
               .message = fmt::format("{} should be {}, not {}", at.empty() ? "the document" : at, expected,
                                      describe_json(*json_)),
               .where = {*file_},
               .notes = {},
               .help = {}}};
}

void Value::out_of_range(const std::string& what) const {
  throw Fault{{.code = codes_->out_of_range,
               .message = fmt::format("{}: {}", path(), what),
               .where = {*file_},
               .notes = {},
               .help = {}}};
}

void Value::unknown_name(const std::string& found) const {
  out_of_range(fmt::format("unknown name \"{}\"", found.substr(0, 60)));
}

Value Value::operator[](std::string_view key) const {
  if (!json_->is_object()) wrong_type("an object");
  const auto it = json_->find(std::string(key));
  if (it == json_->end()) wrong_type(fmt::format("an object with the key \"{}\"", key));
  return Value(*it, *this, key, 0);
}

bool Value::has(std::string_view key) const {
  if (!json_->is_object()) wrong_type("an object");
  return json_->find(std::string(key)) != json_->end();
}

std::vector<std::string> Value::keys() const {
  if (!json_->is_object()) wrong_type("an object");
  std::vector<std::string> keys;
  for (const auto& item : json_->items()) keys.push_back(item.key());
  return keys;
}

Value Value::at(std::size_t index) const {
  if (!json_->is_array()) wrong_type("an array");
  if (index >= json_->size()) wrong_type(fmt::format("an array of at least {} values", index + 1));
  return Value((*json_)[index], *this, {}, index);
}

std::size_t Value::array(std::size_t least, std::size_t most) const {
  if (!json_->is_array()) wrong_type("an array");
  const std::size_t n = json_->size();
  if (n < least || n > most)
    out_of_range(least == most ? fmt::format("{} values instead of {}", n, least)
                               : fmt::format("{} values, expected {} to {}", n, least, most));
  return n;
}

std::int64_t Value::integer(std::int64_t least, std::int64_t most) const {
  if (!json_->is_number_integer()) wrong_type("an integer");
  if (json_->is_number_unsigned() &&
      json_->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    out_of_range("larger than a 64-bit integer holds");
  const auto value = json_->get<std::int64_t>();
  if (value < least || value > most) out_of_range(fmt::format("{} is not between {} and {}", value, least, most));
  return value;
}

double Value::real() const {
  if (json_->is_number()) return json_->get<double>();
  if (json_->is_string()) {
    const auto& word = json_->get_ref<const std::string&>();
    if (word == "inf") return std::numeric_limits<double>::infinity();
    if (word == "-inf") return -std::numeric_limits<double>::infinity();
    if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
  }
  wrong_type("a number");
}

bool Value::boolean() const {
  if (!json_->is_boolean()) wrong_type("true or false");
  return json_->get<bool>();
}

const std::string& Value::text() const {
  if (!json_->is_string()) wrong_type("a string");
  return json_->get_ref<const std::string&>();
}

}  // namespace hotbunk::decode
