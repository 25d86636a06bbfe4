// Python's pickle, as much of protocol 2 as JSON needs. Source of the opcodes: CPython, Lib/pickletools.py.
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "reports/memory_snapshot.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

void little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

void append_integer(std::string& out, std::int64_t value) {
  if (value >= 0 && value < 256) {
    out += 'K', little_endian(out, static_cast<std::uint64_t>(value), 1);  // BININT1
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    out += 'J', little_endian(out, static_cast<std::uint64_t>(value), 4);  // BININT
  } else {
    out += '\x8a', out += '\x08', little_endian(out, static_cast<std::uint64_t>(value), 8);  // LONG1, 8 bytes
  }
}

void append_text(std::string& out, const std::string& text) {
  out += 'X', little_endian(out, text.size(), 4), out += text;  // BINUNICODE
}

void append(std::string& out, const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      out += 'N';
      return;
    case Json::value_t::boolean:
      out += value.get<bool>() ? '\x88' : '\x89';
      return;
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return append_integer(out, value.get<std::int64_t>());
    case Json::value_t::string:
      return append_text(out, value.get_ref<const std::string&>());
    case Json::value_t::array:
      out += "](";  // EMPTY_LIST, MARK … APPENDS
      for (const Json& element : value) append(out, element);
      out += 'e';
      return;
    case Json::value_t::object:
      out += "}(";  // EMPTY_DICT, MARK … SETITEMS
      for (const auto& [key, element] : value.items()) append_text(out, key), append(out, element);
      out += 'u';
      return;
    default:
      HB_CHECK(false, "no pickle for a JSON {}", value.type_name());
  }
}

}  // namespace

std::string to_pickle(const Json& document) {
  std::string out = "\x80\x02";  // PROTO 2
  append(out, document);
  return out + '.';
}

}  // namespace hotbunk
