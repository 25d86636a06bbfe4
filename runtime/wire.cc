#include "runtime/wire.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/check.h"
#include "base/limits.h"

namespace hotbunk {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::size_t header_bytes = 9;  // type, key bytes, value bytes
constexpr int idle_s = 10, interval_s = 2, probes = 5;
constexpr unsigned unanswered_ms = 20'000;

SteadyClock::time_point deadline_after(double seconds) {
  return SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds));
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Null with `error` set when the name is not known.
AddressList resolve(const std::string& host, int port, int flags, std::string& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0) {
    error = gai_strerror(rc);
    found = nullptr;
  }
  return {found, freeaddrinfo};
}

/// Worth another try: rank 0 is not there yet, or its host.
bool may_pass(int error) {
  return error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == ECONNRESET || error == ECONNABORTED || error == EINTR || error == ENETDOWN || error == EHOSTDOWN;
}

int try_connect(const std::string& host, int port, std::string& error) {
  const AddressList found = resolve(host, port, 0, error);
  for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
    const int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0) return fd;
    const int why = errno;
    error = system_error_text(why);
    if (fd >= 0) close(fd);
    if (!may_pass(why) && a->ai_next == nullptr)
      throw RuntimeFailure(fmt::format("no connection to rank 0 at {}:{}: {}", host, port, error));
  }
  return -1;
}

bool is_loopback(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == IN_LOOPBACKNET);
}

/// A socket that listens on this address; -1 with errno set.
int listen_at(const sockaddr* address, socklen_t length) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->sa_family == AF_INET6)  // all addresses: IPv4 comes in as mapped ones
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(fd, address, length) == 0 && listen(fd, 1024) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

int listen_everywhere(int port) {
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_addr = in6addr_any;
  six.sin6_port = htons(static_cast<std::uint16_t>(port));
  const int fd = listen_at(reinterpret_cast<sockaddr*>(&six), sizeof six);
  if (fd >= 0 || errno != EAFNOSUPPORT) return fd;
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = six.sin6_port;
  return listen_at(reinterpret_cast<sockaddr*>(&four), sizeof four);
}

std::string address_text(int fd, bool peer) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char text[NI_MAXHOST] = "";
  auto* const a = reinterpret_cast<sockaddr*>(&address);
  if ((peer ? getpeername(fd, a, &length) : getsockname(fd, a, &length)) == 0)
    getnameinfo(a, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  const std::string_view found = text;
  return std::string(found.starts_with("::ffff:") ? found.substr(7) : found);
}

}  // namespace

bool send_frame(int fd, Message type, std::string_view key, std::string_view value) {
  std::string out(header_bytes, '\0');
  out[0] = static_cast<char>(type);
  const std::uint32_t sizes[2] = {htonl(static_cast<std::uint32_t>(key.size())),
                                  htonl(static_cast<std::uint32_t>(value.size()))};
  std::memcpy(out.data() + 1, sizes, sizeof sizes);
  out.append(key).append(value);
  for (std::size_t sent = 0; sent < out.size();) {
    const ssize_t n = send(fd, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += static_cast<std::size_t>(n);
  }
  return true;
}

bool take_frame(std::string& input, Frame& frame, const FrameLimits& limits) {
  if (input.size() < header_bytes) return false;
  std::uint32_t sizes[2];
  std::memcpy(sizes, input.data() + 1, sizeof sizes);
  const std::size_t key = ntohl(sizes[0]), value = ntohl(sizes[1]);
  if (key > limits.key_bytes || value > limits.value_bytes)
    throw RuntimeFailure(fmt::format("a message with a key of {} B and a value of {} B; {} and {} are the most", key,
                                     value, limits.key_bytes, limits.value_bytes));
  if (input.size() < header_bytes + key + value) return false;
  frame.type = static_cast<Message>(input[0]);
  frame.key = input.substr(header_bytes, key);
  frame.value = input.substr(header_bytes + key, value);
  input.erase(0, header_bytes + key + value);
  return true;
}

void watch_host(int fd) {
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string host_gone(int error, std::string_view address) {
  if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH && error != ENETDOWN) return "";
  return fmt::format("{} has not answered for {} s ({}): that host is gone, or the network to it is cut", address,
                     unanswered_ms / 1000, std::strerror(error));
}

int connect_to(const std::string& host, int port, double seconds) {
  const auto deadline = deadline_after(seconds);
  std::string error;
  for (auto pause = std::chrono::milliseconds(2);; pause = std::min(2 * pause, std::chrono::milliseconds(250))) {
    const int fd = try_connect(host, port, error);
    if (fd >= 0) {
      watch_host(fd);
      return fd;
    }
    if (SteadyClock::now() >= deadline)
      throw RuntimeFailure(
          fmt::format("no connection to rank 0 at {}:{} within {:.0f} s: {}", host, port, seconds, error));
    std::this_thread::sleep_for(pause);
  }
}

int join(const Meeting& at, double seconds) {
  const auto deadline = deadline_after(seconds);
  for (;;) {
    const std::chrono::duration<double> left = deadline - SteadyClock::now();
    const int fd = connect_to(at.host, at.port, std::max(left.count(), 0.0));
    send_frame(fd, Message::token, "hotbunk", at.token);
    std::string input;
    for (Frame frame;;) {
      bool whole = false;
      try {
        whole = take_frame(input, frame);
      } catch (const RuntimeFailure&) {  // whoever listens there, it is not hotbunk
        frame = {Message::refused, "", "it answers with something else than hotbunk's messages"};
        whole = true;
      }
      if (whole && frame.type == Message::welcome) return fd;
      if (whole) {
        close(fd);
        throw RuntimeFailure(fmt::format("rank 0 at {}:{} refuses this rank: {}", at.host, at.port, frame.value));
      }
      pollfd p{fd, POLLIN, 0};
      poll(&p, 1, 100);
      if (SteadyClock::now() >= deadline) {
        close(fd);
        throw RuntimeFailure(fmt::format("no answer of rank 0 at {}:{} within {:.0f} s", at.host, at.port, seconds));
      }
      if (p.revents == 0) continue;
      char buffer[header_bytes];  // a welcome's length: what follows it is for others to read
      const ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;  // hung up: a full house, or rank 0 starts anew
      input.append(buffer, static_cast<std::size_t>(n));
    }
    close(fd);
    if (SteadyClock::now() >= deadline)
      throw RuntimeFailure(fmt::format("rank 0 at {}:{} hangs up on this rank", at.host, at.port));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

int listen_on(const std::string& host, int port) {
  std::string error;
  const AddressList numeric = resolve(host, port, AI_NUMERICHOST, error);
  const AddressList found = resolve(host, port, 0, error);
  if (!found) throw RuntimeFailure(fmt::format("rank 0 cannot listen on {} (MASTER_ADDR): {}", host, error));
  const bool local_name = numeric || host == "localhost";
  int fd = -1, why = EADDRNOTAVAIL;
  if (!local_name && is_loopback(found->ai_addr)) {
    fd = listen_everywhere(port);
    why = errno;
  } else {
    for (const addrinfo* a = found.get(); a != nullptr && fd < 0; a = a->ai_next) {
      fd = listen_at(a->ai_addr, a->ai_addrlen);
      if (fd < 0 && errno != EADDRNOTAVAIL) why = errno;
    }
  }
  if (fd >= 0) return fd;
  if (why == EADDRNOTAVAIL)
    throw RuntimeFailure(fmt::format("rank 0 cannot listen on {} (MASTER_ADDR): no address of this host", host));
  throw RuntimeFailure(
      fmt::format("rank 0 cannot listen on {}, port {} (MASTER_PORT): {}", host, port, system_error_text(why)));
}

bool is_public(int listen_fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return getsockname(listen_fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         !is_loopback(reinterpret_cast<sockaddr*>(&address));
}

std::string local_address(int fd) {
  const std::string found = address_text(fd, false);
  return found.empty() ? "127.0.0.1" : found;
}

std::string peer_address(int fd) {
  const std::string found = address_text(fd, true);
  return found.empty() ? "the other host" : found;
}

}  // namespace hotbunk
