// A YAML document as plain data, every key and value with its file, line and column. yaml-cpp stays behind it.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

struct YamlEntry;

struct YamlNode {
  enum class Kind { null, scalar, sequence, map };
  Kind kind = Kind::null;
  std::string text;     // of a scalar
  bool quoted = false;  // "8" is text, 8 a number
  SourceLocation where;
  std::vector<YamlNode> items;     // of a sequence
  std::vector<YamlEntry> entries;  // of a map, in file order; no key twice

  YamlNode* find(std::string_view key);
  const YamlNode* find(std::string_view key) const;
  /// "a map", "the text 'abc'", "the number 8": for messages that say what was found.
  std::string describe() const;
};

struct YamlEntry {
  std::string key;
  SourceLocation where;
  YamlNode value;
};

/// The bytes are whole characters of UTF-8, in their shortest form.
bool is_utf8(std::string_view text);

/// One document; E204 on keys that appear twice in one map; E201 on bytes that are no UTF-8, syntax errors, more than
/// one document, keys that are no scalars, too deep or too large trees. What anchors and aliases copy is bounded too,
/// in values and in bytes, before it is copied: a "billion laughs" file stops here, of short words or of long ones.
Result<YamlNode> parse_yaml(const std::string& text, const std::string& file);

}  // namespace hotbunk
