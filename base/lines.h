// Files read line by line: a line has a most, or a file without ends of lines (sparse, binary) would fill the memory.
#pragma once
#include <cstddef>
#include <istream>
#include <string>

namespace hotbunk {

inline constexpr std::size_t most_line_bytes = std::size_t{32} << 20;

enum class LineRead { whole, cut, too_long, none };

/// The next line without its end, into `line`. whole; cut: the file ends without an end of line; too_long: more than
/// `most` bytes, of which `line` has the first; none: the file is over.
inline LineRead next_line(std::istream& file, std::string& line, std::size_t most = most_line_bytes) {
  line.clear();
  std::streambuf& bytes = *file.rdbuf();
  for (int c; (c = bytes.sbumpc()) != std::char_traits<char>::eof();) {
    if (c == '\n') return LineRead::whole;
    if (line.size() == most) return LineRead::too_long;
    line.push_back(static_cast<char>(c));
  }
  return line.empty() ? LineRead::none : LineRead::cut;
}

}  // namespace hotbunk
