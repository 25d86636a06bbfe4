#include "backends/cuda/ptx/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace hotbunk::ptx {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view trim(std::string_view s) {
  while (!s.empty() && is_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_space(s.back())) s.remove_suffix(1);
  return s;
}

std::string_view take_word(std::string_view& s) {
  s = trim(s);
  std::size_t n = 0;
  while (n < s.size() && !is_space(s[n])) ++n;
  const std::string_view word = s.substr(0, n);
  s = trim(s.substr(n));
  return word;
}

std::string without_comments(std::string_view text) {
  std::string out(text);
  for (std::size_t i = 0; i + 1 < out.size(); ++i) {
    if (out[i] != '/') continue;
    const bool line = out[i + 1] == '/', block = out[i + 1] == '*';
    if (!line && !block) continue;
    std::size_t end = line ? out.find('\n', i) : out.find("*/", i + 2);
    end = end == std::string::npos ? out.size() : line ? end : end + 2;
    for (; i < end; ++i)
      if (out[i] != '\n') out[i] = ' ';
    --i;
  }
  return out;
}

std::vector<std::string_view> split_operands(std::string_view s) {
  std::vector<std::string_view> out;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '{' || s[i] == '[') ++depth;
    if (s[i] == '}' || s[i] == ']') --depth;
    if (s[i] == ',' && depth == 0) {
      out.push_back(trim(s.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  if (!trim(s.substr(begin)).empty()) out.push_back(trim(s.substr(begin)));
  return out;
}

std::optional<std::int64_t> integer(std::string_view s) {
  bool negative = false;
  if (!s.empty() && s.front() == '-') negative = true, s.remove_prefix(1);
  if (!s.empty() && s.back() == 'U') s.remove_suffix(1);
  int base = 10;
  if (s.starts_with("0x") || s.starts_with("0X")) base = 16, s.remove_prefix(2);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value, base);
  if (s.empty() || error != std::errc() || end != s.data() + s.size()) return std::nullopt;
  return static_cast<std::int64_t>(negative ? ~value + 1 : value);
}

std::optional<std::uint64_t> literal(std::string_view s) {
  if (s.starts_with("0f") || s.starts_with("0F") || s.starts_with("0d") || s.starts_with("0D")) {
    std::uint64_t bits = 0;
    const auto [end, error] = std::from_chars(s.data() + 2, s.data() + s.size(), bits, 16);
    if (error == std::errc() && end == s.data() + s.size()) return bits;
    return std::nullopt;
  }
  if (const auto value = integer(s)) return static_cast<std::uint64_t>(*value);
  return std::nullopt;
}

std::int64_t aligned(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

namespace {

Type element_type(std::string_view word) {
  if (word.starts_with('.')) word.remove_prefix(1);
  for (int t = 0; t <= static_cast<int>(Type::f64); ++t)
    if (name_of(static_cast<Type>(t)) == word && static_cast<Type>(t) != Type::none) return static_cast<Type>(t);
  throw UnknownPtx(fmt::format("type '{}' is not known here", word));
}

}  // namespace

Declaration parse_declaration(std::string_view s) {
  Declaration d;
  std::string_view word = take_word(s);
  if (word == ".align") {
    d.alignment = integer(take_word(s)).value_or(1);
    word = take_word(s);
  }
  const std::int64_t element = bytes_of(element_type(word));
  d.alignment = std::max(d.alignment, element);
  std::string_view values;
  if (const auto equals = s.find('='); equals != std::string_view::npos) {
    values = trim(s.substr(equals + 1));
    s = trim(s.substr(0, equals));
  }
  std::int64_t count = 1;
  if (const auto bracket = s.find('['); bracket != std::string_view::npos) {
    const std::string_view size = trim(s.substr(bracket + 1, s.find(']') - bracket - 1));
    count = size.empty() ? 0 : integer(size).value_or(0);
    s = trim(s.substr(0, bracket));
  }
  d.name = std::string(s);
  d.bytes = count * element;
  if (!values.empty() && values.front() == '{') values = trim(values.substr(1, values.size() - 2));
  for (const std::string_view v : split_operands(values)) {
    const auto bits = literal(v);
    if (!bits) throw UnknownPtx(fmt::format("the initial value '{}' of '{}' is not known here", v, d.name));
    for (std::int64_t b = 0; b < element; ++b) d.initial.push_back(static_cast<std::uint8_t>(*bits >> (8 * b)));
  }
  d.initial.resize(static_cast<std::size_t>(d.bytes));
  return d;
}

}  // namespace hotbunk::ptx
