// Words of a script → their values: variables, defaults, arithmetic.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// A variable, or what a word expands to: several values for an array.
struct ShellValue {
  std::vector<std::string> values;
  std::set<std::string> undefined;       // what it holds and the script does not say, as written: "$HOME"
  std::vector<SourceLocation> places{};  // of each value, where an array gave it; empty: no array did
};

class ShellVariables {
 public:
  explicit ShellVariables(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& name, ShellValue value) { all_[name] = std::move(value); }
  const ShellValue* find(const std::string& name) const {
    const auto at = all_.find(name);
    return at == all_.end() ? nullptr : &at->second;
  }
  /// A word as written → its fields; quotes taken off, unquoted expansions split at blanks. What is not defined stays
  /// as it is written, and is named.
  ShellValue expand(const std::string& word) const;
  /// The same without splitting: the right side of an assignment.
  ShellValue expand_text(const std::string& word) const;
  /// Of "4 * (n + 1)"; none where a name is no number.
  std::optional<std::int64_t> arithmetic(const std::string& text) const;

 private:
  struct Field;
  void expand_into(Field&, const std::string& word, bool splits) const;
  void variable(Field&, const std::string& name, bool splits) const;
  void braces(Field&, const std::string& inside, const std::string& whole, bool splits) const;
  void command(Field&, const std::string& inside, const std::string& whole, bool splits) const;

  std::string folder_;  // of the script: what "$(dirname "$0")" means
  std::map<std::string, ShellValue> all_;
};

}  // namespace hotbunk
