// One rank's connection to the store: a small key-value store served by rank 0 (store_server.h).
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "runtime/wire.h"

namespace hotbunk {

/// Thread-safe; get blocks the others.
class TcpStore {
 public:
  /// RuntimeFailure when rank 0 does not show up or refuses this rank.
  TcpStore(const Meeting&, double connect_seconds);
  ~TcpStore();
  TcpStore(const TcpStore&) = delete;
  TcpStore& operator=(const TcpStore&) = delete;

  int fd() const { return fd_; }
  /// Called while waiting, ten times a second, and when the connection broke (broken: somebody died or is about to be
  /// known dead); throws to give up with a better reason.
  void set_interrupt(std::function<void(bool broken)> interrupt) { interrupt_ = std::move(interrupt); }

  void set(std::string_view key, std::string_view value);
  /// Waits for the key. RuntimeFailure after `seconds`.
  std::string get(std::string_view key, double seconds);
  /// Adds to a counter that starts at 0, returns the sum.
  std::int64_t add(std::string_view key, std::int64_t delta);

 private:
  std::string wait_value(std::string_view key, double seconds);
  void send(Message, std::string_view key, std::string_view value);
  [[noreturn]] void fail_broken(int error);

  int fd_;
  std::string peer_;  // asked while the connection is whole
  std::mutex mutex_;
  std::string input_;
  std::function<void(bool)> interrupt_;
};

}  // namespace hotbunk
