#include "cli/stop_signals.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>

#include "base/check.h"

namespace hotbunk {

StopSignals::StopSignals(bool spawned) : spawned_(spawned), held_(spawned) {
  sigset_t both;
  sigemptyset(&both);
  sigaddset(&both, SIGINT), sigaddset(&both, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &both, nullptr);
  signals_fd_ = ::signalfd(-1, &both, SFD_CLOEXEC);
  end_fd_ = ::eventfd(0, EFD_CLOEXEC);
  HB_CHECK(signals_fd_ >= 0 && end_fd_ >= 0, "no descriptors for signals: errno {}", errno);
  thread_ = std::thread([this] { watch(); });
}

StopSignals::~StopSignals() { release(); }

void StopSignals::release() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  while (::write(end_fd_, &one, sizeof one) < 0 && errno == EINTR)
    ;
  thread_.join();
  ::close(signals_fd_);
  ::close(end_fd_);
}

int StopSignals::exit_code() const { return signal_ == SIGINT && !spawned_ ? exit_interrupted : 0; }

void StopSignals::watch() {
  pollfd waits[] = {{signals_fd_, POLLIN, 0}, {end_fd_, POLLIN, 0}};
  for (;;) {
    if (::poll(waits, 2, -1) < 0) continue;
    if (waits[1].revents != 0) return;
    signalfd_siginfo info{};
    if (::read(signals_fd_, &info, sizeof info) == sizeof info) take(static_cast<int>(info.ssi_signo));
  }
}

void StopSignals::take(int signal) {
  // Nothing of this process's own is half done that anybody would take for whole: files appear by one rename.
  if (!held_) ::_exit(128 + signal);
  if (int none = 0; signal_.compare_exchange_strong(none, signal)) {
    if (say_) say_(signal);
  } else if (signal == SIGINT && !spawned_) {
    ::_exit(exit_interrupted);
  }
}

}  // namespace hotbunk
