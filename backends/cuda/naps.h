// How a thread waits for what it has to ask about: a stream, a call of NCCL.
#pragma once
#include <algorithm>
#include <chrono>
#include <thread>

namespace hotbunk::cuda {

/// Naps between two questions: 10 us, then twice as long each, up to a millisecond or a fiftieth of what the wait has
/// lasted, 50 ms at most. So a wait lasts 2 % too long, and a rank that only waits soon uses less of its core than what
/// counts as work (runtime/stall.h): ranks that wait for each other must not take each other for busy.
class Naps {
 public:
  void nap() {
    using namespace std::chrono_literals;
    std::this_thread::sleep_for(next_);
    const auto longest = std::clamp<Clock::duration>(lasted() / 50, 1ms, 50ms);
    next_ = std::min<Clock::duration>(2 * next_, longest);
  }
  std::chrono::steady_clock::duration lasted() const { return Clock::now() - began_; }
  /// It lasts so long that the watch over ranks should know.
  bool is_long() const { return lasted() > std::chrono::milliseconds(100); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point began_ = Clock::now();
  Clock::duration next_ = std::chrono::microseconds(10);
};

}  // namespace hotbunk::cuda
