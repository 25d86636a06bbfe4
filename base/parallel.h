// Independent pieces of work on the cores of this machine. Results go to places of their own, so that they do not
// depend on how many cores there are.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cores.h"

namespace hotbunk {

/// f(i) for every i in [0, n), up to `threads` at once, or as many as the machine gives. Returns when all have;
/// rethrows what the lowest i threw.
template <class F>
void in_parallel(std::size_t n, F&& f, std::size_t threads = static_cast<std::size_t>(local_cores())) {
  std::vector<std::exception_ptr> thrown(n);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < n; i = next++) {
      try {
        f(i);
      } catch (...) {
        thrown[i] = std::current_exception();
      }
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(std::min(n, threads));
  try {
    for (std::size_t t = 1; t < std::min(n, threads); ++t) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads (EAGAIN): those that are do all of it
  }
  work();
  for (std::thread& t : helpers) t.join();
  for (const std::exception_ptr& e : thrown)
    if (e) std::rethrow_exception(e);
}

}  // namespace hotbunk
