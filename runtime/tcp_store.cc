#include "runtime/tcp_store.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "base/check.h"
#include "base/parse.h"

namespace hotbunk {

TcpStore::TcpStore(const Meeting& at, double connect_seconds)
    : fd_(join(at, connect_seconds)), peer_(peer_address(fd_)) {}

TcpStore::~TcpStore() { close(fd_); }

void TcpStore::fail_broken(int error) {
  const std::string gone = host_gone(error, peer_);
  if (interrupt_) interrupt_(true);
  throw RuntimeFailure("the rendezvous connection to rank 0 is broken" + (gone.empty() ? gone : ": " + gone));
}

void TcpStore::send(Message type, std::string_view key, std::string_view value) {
  const FrameLimits limits;
  HB_CHECK(key.size() <= limits.key_bytes && value.size() <= limits.value_bytes, "\"{}\" with {} B for the store",
           key.substr(0, 80), value.size());
  if (!send_frame(fd_, type, key, value)) fail_broken(errno);
}

void TcpStore::set(std::string_view key, std::string_view value) {
  std::lock_guard lock(mutex_);
  send(Message::set, key, value);
}

std::string TcpStore::get(std::string_view key, double seconds) {
  std::lock_guard lock(mutex_);
  send(Message::get, key, "");
  return wait_value(key, seconds);
}

std::int64_t TcpStore::add(std::string_view key, std::int64_t delta) {
  std::lock_guard lock(mutex_);
  send(Message::add, key, std::to_string(delta));
  const std::string sum = wait_value(key, 60.0);
  const auto value = parse_integer(sum);
  if (!value) throw RuntimeFailure(fmt::format("\"{}\" is no counter: {}", key, sum.substr(0, 40)));
  return *value;
}

std::string TcpStore::wait_value(std::string_view key, double seconds) {
  using SteadyClock = std::chrono::steady_clock;
  const auto deadline =
      SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds));
  for (Frame frame;;) {
    // An answer to an earlier get that was given up may come first: keys tell them apart.
    while (take_frame(input_, frame)) {
      if (frame.type == Message::refused) throw RuntimeFailure("rank 0 refuses this rank: " + frame.value);
      if (frame.key == key) return frame.value;
    }
    pollfd p{fd_, POLLIN, 0};
    const int ready = poll(&p, 1, 100);
    if (interrupt_) interrupt_(false);
    if (ready <= 0) {
      if (SteadyClock::now() >= deadline)
        throw RuntimeFailure(
            fmt::format("waited {:.0f} s for \"{}\", which another rank should have set", seconds, key));
      continue;
    }
    char buffer[16 << 10];
    const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_broken(n < 0 ? errno : 0);
    input_.append(buffer, static_cast<std::size_t>(n));
  }
}

}  // namespace hotbunk
