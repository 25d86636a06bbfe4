// How results and errors reach the user. Results go to stdout, narration and errors to stderr; under --json stdout
// holds one document, which is the result or, where there is none, the errors.
#pragma once
#include <string>
#include <string_view>

#include "base/diagnostic.h"

namespace hotbunk {

/// From here on the process ends with its errors as one document on stdout, unless a result was printed there.
void errors_as_json();
/// Back again: of several processes with one stdout, one speaks.
void errors_stay_on_stderr();

/// The result of a command under --json, a whole document.
void print_document(std::string_view json);

/// Prints to stderr and remembers them for the document. Returns the exit code that the first error's class asks for:
/// capacity (E301, E302, E310, E312) is "the answer is no" 1, E6xx 3, else 2.
int report_errors(const Diagnostics&);

/// What main returns. Under --json and without a result, the errors reported so far go to stdout:
///   {"schema": "hotbunk.error/1", "exit_code": 2, "code": "E202", "message": …, "where": {"file", "line", "column"},
///    "notes": […], "help": …, "errors": [every one of them, of the same form]}
/// The fields at the top are the first error's, which the exit code follows.
int end_process(int exit_code);

/// Where threads may never return (runtime/stuck.h): what was printed leaves the process, and under --json without a
/// result the errors do, `why` behind them. Waits for no thread.
void end_stuck_output(const std::string& why);

/// "Next: hotbunk …" on stderr: narration. Only for commands that work.
void say_next(std::string_view command);

}  // namespace hotbunk
