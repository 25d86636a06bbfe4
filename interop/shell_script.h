// The commands of a launch script, read and never run: assignments, arrays, defaults (${X:-8}), arithmetic, `source`,
// conditions on variables and loops over words are followed as bash does; what a command would print is not known.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// One word of a command after expansion. `undefined` names what it holds and the script does not say: "$HOME",
/// "$(nproc)".
struct ShellWord {
  std::string text;
  SourceLocation where;
  std::vector<std::string> undefined;
};
using ShellCommand = std::vector<ShellWord>;

struct ShellScript {
  std::vector<ShellCommand> commands;  // in the order in which they would run
  std::vector<ShellWord> assignments;  // NAME=value, as written
  std::vector<std::string> notes;      // what was taken for granted: files not found, conditions not decided
};

/// `variables` are set before the script starts. E101, E102: the file; E150: its quotes or brackets do not close. Files
/// that it sources are read where they are found, and noted where they are not.
Result<ShellScript> read_shell_script(const std::filesystem::path&,
                                      const std::map<std::string, std::string>& variables);

/// The same of a text; `file` is its name in messages, and `source` looks in its folder.
Result<ShellScript> parse_shell_script(const std::string& text, const std::string& file,
                                       const std::map<std::string, std::string>& variables);

}  // namespace hotbunk
