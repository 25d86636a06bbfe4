// Numbers out of text that somebody else wrote.
#pragma once
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hotbunk {

/// The decimal integer that `text` is as a whole; nothing when it is anything else or does not fit. Throws nothing.
inline std::optional<std::int64_t> parse_integer(std::string_view text) {
  std::int64_t value = 0;
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

}  // namespace hotbunk
