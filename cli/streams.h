// The program's standard streams: there from the start, whole at the end.
#pragma once
#include <exception>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

/// Before anything is opened. A closed standard stream would make the next file or socket take its number, and results
/// would be written into it: closed ones are opened on /dev/null, and a closed stdout is E105.
Status check_standard_streams();

/// A part of a result, to stdout. What does not get there is no exception and ends nothing: finish_output tells it.
void print_result(std::string_view);
/// What was printed leaves the process now, before what others print.
void flush_output();
/// After a command: what it printed has left the process. E605 when it has not, with the first reason there was.
Status finish_output();

/// What an exception that reached main means: E604 for a limit of the system, E605 for a stdout that takes no more,
/// E603 for a failed run, else E699.
Diagnostic uncaught(const std::exception&);

}  // namespace hotbunk
