// Waiting on a word in shared memory: sleeps in the kernel, wakes now and then to see whether somebody died.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "backends/cpu_gloo/death_watch.h"
#include "backends/cpu_gloo/shm_region.h"
#include "base/check.h"

namespace hotbunk {

class ShmWaiter {
 public:
  /// spins: looks at the word this many times (about 30 ns each) before it sleeps; 0 where ranks outnumber cores.
  ShmWaiter(const DeathWatch& watch, double timeout_seconds, int spins)
      : watch_(watch), timeout_seconds_(timeout_seconds), spins_(spins) {}

  /// Returns once ready(word). Throws RuntimeFailure when a rank died or the time is over; describe() says what waited.
  template <class Ready, class Describe>
  void until(const std::atomic<std::uint32_t>& word, const Ready& ready, const Describe& describe) const {
    for (int i = 0; i <= spins_; ++i) {
      if (ready(word.load(std::memory_order_acquire))) return;
      pause_cpu();
    }
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      const std::uint32_t seen = word.load(std::memory_order_acquire);
      if (ready(seen)) return;
      if (watch_.any_dead()) watch_.check(describe());
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      if (waited.count() >= timeout_seconds_)
        throw RuntimeFailure(fmt::format("{}: nothing happened for {:.1f} s", describe(), waited.count()));
      futex_wait(word, seen, std::min(slice_seconds, timeout_seconds_));
    }
  }

 private:
  static constexpr double slice_seconds = 0.1;  // how late a death may be noticed here

  static void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const DeathWatch& watch_;
  double timeout_seconds_;
  int spins_;
};

}  // namespace hotbunk
