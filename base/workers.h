// Threads that stay, for many short rounds of work: a round costs no start of a thread, and does not wait for one that
// the machine has no core for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hotbunk {

class Workers {
 public:
  /// The caller is one of them.
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
  };
  void help(int thread);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Round> round_;
  std::size_t rounds_ = 0;
  bool over_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace hotbunk
