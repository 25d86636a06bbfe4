// What the system refused, in words that name the limit behind it.
#pragma once
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"

namespace hotbunk {

/// "Too many open files: this process may have 8 (ulimit -n)": the text of an errno, and where it stands for a limit
/// that a user sets, the limit. EMFILE: open files; EAGAIN: processes and threads, and addresses for
/// their stacks; ENOMEM: addresses; EFBIG: the size of a file.
std::string system_error_text(int error);

/// "this process may have 419430400 B of addresses (ulimit -v)"; "" where nobody limits them.
std::string address_limit_text();

/// A thread that runs f. RuntimeFailure, naming the limit, when the system gives no more.
template <class F>
std::thread start_thread(F&& f) {
  try {
    return std::thread(std::forward<F>(f));
  } catch (const std::system_error& e) {
    throw RuntimeFailure("cannot start a thread: " + system_error_text(e.code().value()));
  }
}

/// Starts `count` threads at once and lets them end: what a library that ends the process instead of failing (OpenMP)
/// will find. RuntimeFailure as above.
void check_threads(int count);

/// Raises the limit of open files as far as this process may. RuntimeFailure when it stays below `needed`.
void check_open_files(long needed);

}  // namespace hotbunk
