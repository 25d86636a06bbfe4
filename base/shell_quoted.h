// Arguments as a POSIX shell reads them.
#pragma once
#include <string>
#include <string_view>

namespace hotbunk {

/// An argument as one word, quoted where it needs that.
inline std::string shell_quoted(std::string_view argument) {
  constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=:,+@%-";
  if (!argument.empty() && argument.find_first_not_of(plain) == std::string_view::npos) return std::string(argument);
  std::string out = "'";
  for (const char c : argument) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace hotbunk
