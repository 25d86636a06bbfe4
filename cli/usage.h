// Mistakes in a command line as diagnostics, like every other mistake of a user.
#pragma once
#include "base/diagnostic.h"

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace hotbunk {

/// What the command line's parser refused, with the nearest option's name. E126 no command, E141 an argument that
/// nothing takes, E142 one that is missing, E143 a value out of range or of the wrong form, E144 options that exclude
/// or need each other.
Diagnostic usage_error(const CLI::App&, const CLI::ParseError&);

/// E126: a first word that is none of the commands.
Diagnostic no_such_command(const CLI::App&, const std::string& word);

}  // namespace hotbunk
