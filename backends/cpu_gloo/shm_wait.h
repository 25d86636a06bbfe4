// Waiting on a word in shared memory: sleeps in the kernel, wakes now and then to see whether somebody died. How long
// it may last is the watch's affair (stall.h).
#pragma once
#include <fmt/ranges.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/check.h"
#include "runtime/death_watch.h"
#include "runtime/shm_region.h"

namespace hotbunk {

class ShmWaiter {
 public:
  /// spins: looks at the word this many times (about 30 ns each) before it sleeps; 0 where ranks outnumber cores.
  ShmWaiter(const DeathWatch& watch, int spins) : watch_(watch), spins_(spins) {}

  /// Returns once ready(word). Throws RuntimeFailure when a rank died or nobody worked for too long; what() says what
  /// waited, missing() for which world ranks.
  template <class Ready, class What, class Missing>
  void until(const std::atomic<std::uint32_t>& word, const Ready& ready, const What& what,
             const Missing& missing) const {
    for (int i = 0; i <= spins_; ++i) {
      if (ready(word.load(std::memory_order_acquire))) return;
      pause_cpu();
    }
    std::optional<StallWatch::Wait> wait;  // most waits are over before anybody could ask
    for (int slices = 0;; ++slices) {
      const std::uint32_t seen = word.load(std::memory_order_acquire);
      if (ready(seen)) return;
      if (watch_.any_dead()) watch_.check(fmt::format("{}, waiting for ranks {}", what(), fmt::join(missing(), ", ")));
      if (slices == 1) wait.emplace(watch_.stalls(), what, missing);
      futex_wait(word, seen, slice_seconds);
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
  int spins_;
};

}  // namespace hotbunk
