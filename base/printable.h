// Text of users on its way to a terminal.
#pragma once
#include <string>
#include <string_view>

namespace hotbunk {

/// The text with everything escaped that a terminal would obey or show as something else: control characters (ESC
/// becomes \x1b, C1 as well), the marks that turn the direction of writing, and bytes that are no UTF-8 (\xff). Tabs
/// and line ends stay: messages have several lines.
std::string printable(std::string_view text);

/// The same for what must stay on its line: a name, a path, a key.
std::string printable_line(std::string_view text);

/// The bytes of the UTF-8 character that text begins with, in its shortest form; 0: it begins with none.
std::size_t utf8_length(std::string_view text);

}  // namespace hotbunk
