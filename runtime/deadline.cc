#include "runtime/deadline.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <utility>

#include "base/limits.h"
#include "runtime/stuck.h"

namespace hotbunk {
namespace {

/// Of a core.
constexpr double least_used = 0.01;

double used_so_far_s() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

Deadline::Deadline(std::string what, double seconds) : what_(std::move(what)), seconds_(seconds) {
  if (seconds_ > 0) try {
      thread_ = start_thread([this] { watch(); });
    } catch (const RuntimeFailure& e) {
      std::fprintf(stderr, "hotbunk: nobody watches that %s comes to an end: %s\n", what_.c_str(), e.what());
    }
}

Deadline::~Deadline() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  over_.notify_all();
  thread_.join();
}

void Deadline::watch() {
  const auto interval = std::chrono::duration<double>(std::clamp(seconds_ / 4, 0.02, 1.0));
  double idle = 0.0, cpu = used_so_far_s();
  auto looked = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!over_.wait_for(lock, interval, [this] { return done_; })) {
    const auto now = std::chrono::steady_clock::now();
    const double elapsed = std::chrono::duration<double>(now - std::exchange(looked, now)).count();
    const double used = used_so_far_s(), before = std::exchange(cpu, used);
    // Time in which this process did not run itself (stopped with the whole job) is nobody's fault.
    idle = used - before >= least_used * elapsed ? 0.0 : idle + std::min(elapsed, 3 * interval.count());
    if (idle < seconds_) continue;
    end_stuck(fmt::format("{} has not come to an end, and this process did nothing for {:g} s (run.timeout_s)", what_,
                          seconds_));
  }
}

}  // namespace hotbunk
