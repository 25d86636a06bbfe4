#include "cli/streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "base/limits.h"

namespace hotbunk {
namespace {

Diagnostic no_output(int error) {
  return {.code = "E605",
          .message = std::string("results cannot be written to standard output: ") + std::strerror(error),
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

Status finish_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return fail(no_output(errno != 0 ? errno : EIO));
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
