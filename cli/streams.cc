#include "cli/streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <new>
#include <string>
#include <system_error>

#include "base/limits.h"

namespace hotbunk {
namespace {

/// Why stdout took no more, when it first did not: stdio remembers that it failed, and not why. Belongs to the process,
/// as stdout does.
int& output_error() {
  static int error = 0;
  return error;
}

Diagnostic no_output(int error) {
  return {.code = "E605",
          .message = std::string("results cannot be written to standard output: ") + system_error_text(error),
          .where = {},
          .notes = {},
          .help = "free space there, or keep the reader of the pipe running"};
}

}  // namespace

Status check_standard_streams() {
  bool closed[3];
  for (int fd = 0; fd < 3; ++fd) {
    closed[fd] = fcntl(fd, F_GETFD) < 0;
    if (closed[fd] && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) != fd) return fail(no_output(errno));
  }
  if (!closed[1]) return {};
  return fail(Diagnostic{.code = "E105",
                         .message = "standard output is closed: results go there",
                         .where = {},
                         .notes = {},
                         .help = "give it somewhere to go: a file, a pipe or /dev/null"});
}

void print_result(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && output_error() == 0) output_error() = errno;
}

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_error() == 0) output_error() = errno;
}

Status finish_output() {
  flush_output();
  if (output_error() == 0 && std::ferror(stdout) == 0) return {};
  return fail(no_output(output_error() != 0 ? output_error() : EIO));
}

Diagnostic uncaught(const std::exception& e) {
  if (const auto* system = dynamic_cast<const std::system_error*>(&e)) {
    const int error = system->code().value();
    // Only a thread that cannot be started says EAGAIN; only formatted output, which goes to stdout, fails otherwise.
    if (error == EAGAIN || error == EMFILE || error == ENFILE)
      return {.code = "E604",
              .message = "the system gives no more: " + system_error_text(error),
              .where = {},
              .notes = {},
              .help = "raise the limit, or start fewer ranks or threads (--threads)"};
    if (std::ferror(stdout) != 0) return no_output(error);
  }
  if (dynamic_cast<const std::bad_alloc*>(&e))
    return {.code = "E604",
            .message = "the system gives no more memory: " + system_error_text(ENOMEM),
            .where = {},
            .notes = {},
            .help = "raise the limit, or ask for less: fewer steps, ranks or layouts"};
  if (dynamic_cast<const RuntimeFailure*>(&e))
    return {
        .code = "E603", .message = e.what(), .where = {}, .notes = {}, .help = "`hotbunk doctor` tries the machine"};
  return {.code = "E699",
          .message = e.what(),
          .where = {},
          .notes = {},
          .help = "this is a fault of hotbunk; please report it with the scenario"};
}

}  // namespace hotbunk
