// An end for what may never return and nobody waits for: opening a device before ranks have met, and giving it back
// when they have said goodbye.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace hotbunk {

/// While it lives, `what` must go on: where this process uses no CPU (a hundredth of a core is enough) for so many
/// seconds, it says so on stderr and ends with exit code 3 (stuck.h). 0 seconds, or a system that gives no thread,
/// which is said: for ever. Destructors make one, so none throws.
class Deadline {
 public:
  Deadline(std::string what, double seconds);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void watch();

  const std::string what_;
  const double seconds_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace hotbunk
