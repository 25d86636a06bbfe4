// Files read line by line: a line has a most, or a file without ends of lines (sparse, binary) would fill the memory.
#pragma once
#include <cstddef>
#include <istream>
#include <string>

namespace hotbunk {

/// Of the longest line that we write, the lengths of an iteration, it is some 25 million samples.
inline constexpr std::size_t most_line_bytes = std::size_t{256} << 20;

enum class LineRead { whole, cut, too_long, failed, none };

/// The next line without its end, into `line`. whole; cut: the file ends without an end of line; too_long: more than
/// `most` bytes, of which `line` has the first; failed: the system does not give the bytes; none: the file is over.
inline LineRead next_line(std::istream& file, std::string& line, std::size_t most = most_line_bytes) {
  line.clear();
  std::streambuf& bytes = *file.rdbuf();
  try {
    for (int c; (c = bytes.sbumpc()) != std::char_traits<char>::eof();) {
      if (c == '\n') return LineRead::whole;
      if (line.size() == most) return LineRead::too_long;
      line.push_back(static_cast<char>(c));
    }
  } catch (const std::ios_base::failure&) {  // a file buffer says so with an exception, whatever the stream's mask
    return LineRead::failed;
  }
  return line.empty() ? LineRead::none : LineRead::cut;
}

}  // namespace hotbunk
