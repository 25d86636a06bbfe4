// A port for a world whose ranks a test starts by hand.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>

namespace hotbunk {

/// A port of 127.0.0.1 that nobody else is given while the object lives. Bound and never listening: rank 0, which binds
/// with SO_REUSEADDR as this does, may listen there; the system hands the number to nobody else.
class ReservedPort {
 public:
  /// 0: whichever is free.
  explicit ReservedPort(int number = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(number));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const a = reinterpret_cast<sockaddr*>(&address);
    if (fd_ < 0 || ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 || ::bind(fd_, a, length) != 0 ||
        ::getsockname(fd_, a, &length) != 0)
      throw std::runtime_error("no free port on 127.0.0.1");
    number_ = ntohs(address.sin_port);
  }
  ~ReservedPort() { ::close(fd_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const { return number_; }

 private:
  int fd_, number_ = 0;
};

}  // namespace hotbunk
