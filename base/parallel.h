// Independent pieces of work on the cores of this machine. Results go to places of their own, so that they do not
// depend on how many cores there are.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace hotbunk {

/// The cores of this machine, at least 1.
inline std::size_t default_threads() { return std::max(1U, std::thread::hardware_concurrency()); }

/// f(i) for every i in [0, n), up to `threads` at once. Returns when all have; rethrows what the lowest i threw.
template <class F>
void in_parallel(std::size_t n, F&& f, std::size_t threads = default_threads()) {
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
  for (std::size_t t = 1; t < std::min(n, threads); ++t) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
  for (const std::exception_ptr& e : thrown)
    if (e) std::rethrow_exception(e);
}

}  // namespace hotbunk
