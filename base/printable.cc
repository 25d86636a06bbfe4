#include "base/printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace hotbunk {
namespace {

/// The code point of a whole character of `length` bytes.
std::uint32_t decode(std::string_view text, std::size_t length) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  std::uint32_t code = length == 1 ? byte(0) : byte(0) & (0x7fu >> length);
  for (std::size_t k = 1; k < length; ++k) code = code << 6 | (byte(k) & 0x3fu);
  return code;
}

/// C0, DEL and C1; marks, embeddings, overrides and isolates of bidirectional text; line and paragraph separators.
bool is_obeyed(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

std::string escaped(std::string_view text, bool keep_lines) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text.substr(i));
    if (length == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i++]));
      continue;
    }
    const std::uint32_t code = decode(text.substr(i), length);
    if (keep_lines && (code == '\n' || code == '\t')) out += text[i];
    else if (!is_obeyed(code)) out += text.substr(i, length);
    else if (code == '\n') out += "\\n";
    else if (code == '\t') out += "\\t";
    else out += code < 0x80 ? fmt::format("\\x{:02x}", code) : fmt::format("\\u{:04x}", code);
    i += length;
  }
  return out;
}

}  // namespace

std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  if (text.empty()) return 0;
  const unsigned first = byte(0);
  const std::size_t length = first < 0x80   ? 1
                             : first < 0xc2 ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  for (std::size_t k = 1; k < length; ++k)
    if ((byte(k) & 0xc0u) != 0x80u) return 0;
  if (length == 0) return 0;
  const std::uint32_t code = decode(text, length);
  // Longer than needed, a surrogate, or beyond Unicode.
  const bool legal = !(length == 3 && code < 0x800) && !(length == 4 && (code < 0x10000 || code > 0x10ffff)) &&
                     !(code >= 0xd800 && code < 0xe000);
  return legal ? length : 0;
}

std::string printable(std::string_view text) { return escaped(text, true); }
std::string printable_line(std::string_view text) { return escaped(text, false); }

}  // namespace hotbunk
