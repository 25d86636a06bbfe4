// Writing compact JSON by hand: plans and traces have millions of values, and a DOM of them would cost more than the
// values.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace hotbunk {

/// `text` between quotes, escaped as RFC 8259 asks; also escapes "</" so that the result may stand inside <script>.
/// Bytes that are not UTF-8 are replaced by U+FFFD.
void append_json(std::string& out, std::string_view text);
void append_json(std::string& out, std::int64_t value);
inline void append_json(std::string& out, std::int32_t value) { append_json(out, std::int64_t{value}); }
/// The shortest text that reads back to the same bits, always with a '.', 'e' or sign of being a double; not-finite
/// values become the strings "inf", "-inf" and "nan".
void append_json(std::string& out, double value);

/// Puts `separator` before every element but the first: `Commas c; for (…) c.before(out), append…`.
class Commas {
 public:
  void before(std::string& out) {
    if (!first_) out += ',';
    first_ = false;
  }

 private:
  bool first_ = true;
};

}  // namespace hotbunk
