// The program's standard streams: there from the start, whole at the end.
#pragma once
#include <exception>
#include <optional>

#include "base/diagnostic.h"

namespace hotbunk {

/// Before anything is opened. A closed standard stream would make the next file or socket take its number, and results
/// would be written into it: closed ones are opened on /dev/null, and a closed stdout is E105.
Status check_standard_streams();

/// After a command: what it printed has left the process. E605 when it has not.
Status finish_output();

/// What an exception that reached main means: E604 for a limit of the system, E605 for a stdout that takes no more,
/// else E699.
Diagnostic uncaught(const std::exception&);

}  // namespace hotbunk
