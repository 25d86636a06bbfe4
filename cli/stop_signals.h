// SIGINT and SIGTERM as requests: a run ends after the step in progress, with its checkpoint. A second SIGINT ends it
// at once.
#pragma once
#include <atomic>
#include <functional>
#include <thread>

namespace hotbunk {

class StopSignals {
 public:
  /// Blocks both signals in the calling thread, and so in all that it starts: construct it before them. A signal that
  /// comes before hold() ends the process, as it would without this. `spawned`: by our launcher, who passes signals on,
  /// the ones it got before we looked too, and decides itself what a second one means (one key press may reach a rank
  /// twice): held from the start.
  explicit StopSignals(bool spawned = false);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// From now on the first signal is a request.
  void hold() { held_ = true; }
  /// Called once, from this object's thread, with the first signal; set it before hold().
  void on_request(std::function<void(int signal)> say) { say_ = std::move(say); }
  /// Leaves the signals blocked, for somebody else to wait for.
  void release();

  bool requested() const { return signal_.load(std::memory_order_relaxed) != 0; }
  /// Of a run that ended early because it was asked to: 130 (128 + SIGINT), or 0.
  int exit_code() const;

 private:
  void watch();
  void take(int signal);

  int signals_fd_ = -1, end_fd_ = -1;
  std::atomic<int> signal_{0};
  const bool spawned_;
  std::atomic<bool> held_;
  std::function<void(int)> say_;
  std::thread thread_;
};

/// Exit code of a process that SIGINT ended.
inline constexpr int exit_interrupted = 130;

}  // namespace hotbunk
