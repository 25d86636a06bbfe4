// The thread pool: independent pieces of work on the cores of this machine. Results go to places of their own, so that
// they do not depend on how many threads there are. (The CPU kernels share oneDNN's OpenMP team instead:
// backends/cpu_gloo/kernels/parallel.h says why.)
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/cores.h"

namespace hotbunk {

/// Threads that stay, for many short rounds of work: a round costs no start of a thread, and does not wait for one that
/// the machine has no core for.
class Workers {
 public:
  /// The caller is one of them. Where the machine gives no more threads, those that are do all of it.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  /// work(i, thread) for every i in [0, count), once each; `thread` in [0, threads()) is never at two pieces at a time.
  /// Returns when all are done; rethrows what the lowest i threw. Work must not ask for more of it here.
  void each(std::size_t count, std::function<void(std::size_t, int)> work);

 private:
  /// Outlives its round: a helper that comes late finds nothing left in it.
  struct Round {
    std::function<void(std::size_t, int)> work;
    std::size_t count = 0;
    std::atomic<std::size_t> next{0}, done{0};
    std::mutex mutex;  // of what follows
    std::exception_ptr thrown{};
    std::size_t thrown_by = 0;
    void run(int thread);
    void wait();
  };
  void help(int thread);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Round> round_;
  std::size_t rounds_ = 0;
  bool over_ = false;
  std::vector<std::thread> helpers_;
};

/// One round: f(i) for every i in [0, n), up to `threads` at once, or as many as the machine gives. Returns when all
/// have; rethrows what the lowest i threw.
template <class F>
void in_parallel(std::size_t n, F&& f, std::size_t threads = static_cast<std::size_t>(local_cores())) {
  Workers workers(static_cast<int>(std::min(n, threads)));
  workers.each(n, [&f](std::size_t i, int) { f(i); });
}

}  // namespace hotbunk
