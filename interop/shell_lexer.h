// Bash's text cut into words and operators, quotes and expansions still in the words.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

struct ShellToken {
  enum class Kind : std::uint8_t { word, operation, array, end };
  Kind kind = Kind::end;
  std::string text;                    // of a word, as written; of an array assignment its name; "\n", ";", "&&", …
  bool appends = false;                // NAME+=( … )
  std::vector<ShellToken> elements{};  // of an array
  SourceLocation where{};
};

/// E150 where a quote or a bracket does not close. Comments and here-documents are left out; the last token is an end.
Result<std::vector<ShellToken>> lex_shell(const std::string& text, const std::string& file);

/// The end of what begins at `at` with ' " ` ${ or $( in the text: behind its closing mark; npos: it does not close.
std::size_t end_of_quoted(const std::string& text, std::size_t at);

}  // namespace hotbunk
